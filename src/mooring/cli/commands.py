"""The commands of the server's distribution, which join those of the client by an entry point."""

import logging
import os
import sys
from typing import Final

from mooring_client.cli.commands import Entry, Section


def prepare() -> None:
    """Prepare this process for any command of the server."""
    # Only the user who runs a command may read its files: a database contains tenants' private data.
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr
    )
    for library in ("httpx", "httpcore", "alembic", "urllib3", "asyncssh"):
        logging.getLogger(library).setLevel(logging.WARNING)


_CLI: Final = "mooring.cli"
SECTIONS: Final = (
    Section(
        "Server",
        {
            "up": Entry(f"{_CLI}.services:up", "Run the control plane with this machine as its node."),
            "server": Entry(f"{_CLI}.services:server", "Run the control plane alone."),
            "gateway": Entry(
                f"{_CLI}.services:gateway", "Run a gateway: SSH into instances, and the port proxy."
            ),
            "agent": Entry(f"{_CLI}.services:agent", "Run this machine as a node."),
            "doctor": Entry(f"{_CLI}.doctor:doctor", "Check whether this machine can be a node."),
            "toolbox": Entry(f"{_CLI}.toolbox:toolbox", "Build this node's toolbox: sftp, scp and rsync."),
            "join-token": Entry(
                f"{_CLI}.join_token:join_token", "Create a join token directly in the database."
            ),
            "gateway-keys": Entry(f"{_CLI}.gateway_keys:app", "Manage the keys of gateways."),
            "db": Entry(f"{_CLI}.database:app", "Manage the database: schema, backups, roles."),
            "audit": Entry(f"{_CLI}.audit:app", "Read the audit log directly from the database."),
        },
        prepare="mooring.cli.commands:prepare",
    ),
)
