"""The `mooring` command."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from mooring import __version__
from mooring.cli.audit import app as audit
from mooring.cli.common import (
    explained_problems,
    migration_url,
    open_database,
    read_settings,
    sign_with_audit_keys,
)
from mooring.cli.gateway_keys import app as gateway_keys
from mooring.cli.thread_failures import end_process_on_thread_failure

if TYPE_CHECKING:
    from mooring.agent.settings import AgentSettings

app = typer.Typer(
    name="mooring",
    help="GPU-as-a-Service on the GPU servers you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
db = typer.Typer(help="Manage the database: schema, backups, roles.", no_args_is_help=True)
app.add_typer(db, name="db")
app.add_typer(audit, name="audit")
app.add_typer(gateway_keys, name="gateway-keys")

# Each command imports what it runs: an agent must not load the control plane into memory.


@app.callback()
def _main() -> None:
    # Only the user who runs a command may read its files: a database contains tenants' private data.
    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr
    )
    for library in ("httpx", "httpcore", "alembic", "urllib3", "asyncssh"):
        logging.getLogger(library).setLevel(logging.WARNING)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def up() -> None:
    """Run the control plane with this machine as its node; both end together."""
    end_process_on_thread_failure()
    from mooring.agent.settings import AgentSettings  # noqa: PLC0415
    from mooring.cli.up import run  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    # Both are read before the start, so that no invalid setting stops it after the admin key is created.
    settings, agent_settings = read_settings(Settings), read_settings(AgentSettings)
    with explained_problems():
        raise typer.Exit(run(settings, agent_settings))


@app.command()
def server() -> None:
    """Run the control plane alone; nodes join with `mooring agent`."""
    end_process_on_thread_failure()
    from mooring.cli.up import serve_alone  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    settings = read_settings(Settings)
    with explained_problems():
        serve_alone(settings)


@app.command()
def gateway(
    local: Annotated[bool, typer.Option(hidden=True, help="started by `mooring up`; ends with it")] = False,
) -> None:
    """Run a gateway: SSH into instances. It needs the server's database and encryption keys."""
    end_process_on_thread_failure()
    from mooring.cli.gateway import run  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    run(read_settings(Settings), ends_with_parent=local)


@app.command()
def agent(
    local: Annotated[bool, typer.Option(hidden=True, help="started by `mooring up`; ends with it")] = False,
) -> None:
    """Run this machine as a node: MOORING_SERVER_URL=… MOORING_JOIN_TOKEN=… mooring agent."""
    end_process_on_thread_failure()
    from mooring.agent.main import run  # noqa: PLC0415
    from mooring.agent.settings import AgentSettings  # noqa: PLC0415

    settings = read_settings(AgentSettings)
    tokens = _tokens(settings)
    if local:
        raise typer.Exit(run(settings, lambda _name: next(tokens, None), simulate_missing=True, parent_fd=0))
    raise typer.Exit(run(settings, lambda _name: next(tokens, None)))


def _tokens(settings: "AgentSettings") -> Iterator[str]:
    """Yield the comma-separated join tokens: each is single-use, so simulated nodes need one each."""
    given = settings.join_token.get_secret_value() if settings.join_token else ""
    yield from filter(None, given.split(","))


def _check_name(given: str | None) -> str | None:
    from pydantic import TypeAdapter  # noqa: PLC0415

    from mooring_client.schemas.text import Name  # noqa: PLC0415

    try:
        return given and TypeAdapter[str](Name).validate_python(given)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"]) from None


@app.command("join-token")
def join_token(
    ttl_s: Annotated[int, typer.Option(min=1, max=86_400, help="lifetime of the token in seconds")] = 3600,
    node_name: Annotated[
        str | None, typer.Option(callback=_check_name, help="the only node that may join")
    ] = None,
) -> None:
    """Create a join token directly in the database, without an API key, and print it."""
    from mooring.control.nodes import joins  # noqa: PLC0415
    from mooring.core.access import on_host  # noqa: PLC0415

    with open_database() as database:
        sign_with_audit_keys(database)
        with database.write() as session:
            _token, secret = joins.create_join_token(session, on_host("join_token.create"), ttl_s, node_name)
    typer.echo(secret)


@app.command()
def doctor() -> None:
    """Check whether this machine can be a node, and say how to fix what fails."""
    from mooring.agent.settings import AgentSettings  # noqa: PLC0415
    from mooring.cli.doctor import examine  # noqa: PLC0415

    raise typer.Exit(examine(read_settings(AgentSettings)))


@app.command()
def toolbox() -> None:
    """Build this node's toolbox: sftp, scp and rsync for instances that start later; safe to repeat."""
    from mooring.cli.toolbox import run  # noqa: PLC0415

    raise typer.Exit(run())


@db.command()
def upgrade(revision: Annotated[str, typer.Argument()] = "head") -> None:
    """Migrate the database to a revision; safe to repeat."""
    from mooring.db import migrate  # noqa: PLC0415

    with explained_problems():
        migrate.upgrade(migration_url(), revision)
        typer.echo(f"the database is at {_current()}")


@db.command()
def downgrade(revision: Annotated[str, typer.Argument(help="such as -1, or base")]) -> None:
    """Migrate back to a revision. Back up first: data of newer tables is lost."""
    from mooring.db import migrate  # noqa: PLC0415

    with explained_problems():
        migrate.downgrade(migration_url(), revision)
        typer.echo(f"the database is at {_current()}")


@db.command()
def backup(file: Annotated[Path, typer.Argument(help="the new file; an old one is replaced")]) -> None:
    """Write a checked backup of the database to a file, while servers run."""
    from mooring.cli import backup as backups  # noqa: PLC0415

    with explained_problems():
        backups.backup(file)


@db.command()
def restore(file: Annotated[Path, typer.Argument(help="made by `mooring db backup`")]) -> None:
    """Replace the database with a backup. Stop all servers first.

    SQLite: the old files are kept. PostgreSQL: the old tables are removed, in the same transaction.
    """
    from mooring.cli import backup as backups  # noqa: PLC0415

    with explained_problems():
        backups.restore(file)


@db.command()
def current() -> None:
    """Print the revision of the database, and the one that this program expects."""
    from mooring.db import migrate  # noqa: PLC0415

    typer.echo(f"the database is at {_current()}; this program expects {migrate.newest()}")


@db.command("accept-clock")
def accept_clock() -> None:
    """Accept this machine's clock after it was wrong. Restart the service afterwards.

    The service does not follow a clock that jumps: see "Clocks" in docs/operating.md. On PostgreSQL, run this
    on the machine of each replica, and restart all of them.
    """
    from mooring.db import timekeeping  # noqa: PLC0415
    from mooring.settings import Settings  # noqa: PLC0415

    at = timekeeping.accept_wall_clock(read_settings(Settings).data_dir)
    typer.echo(f"the service will continue from {at}; restart it now")


@db.command()
def grant(
    role: Annotated[str, typer.Argument(help="PostgreSQL role of the server")],
) -> None:
    """Grant a role what the server needs, without changes to the audit log; safe to repeat.

    Runs as the owner of the tables (MOORING_DATABASE_OWNER_URL). With MOORING_DATABASE_ROLE_PASSWORD it
    creates the role or sets its password.
    """
    from mooring.db import roles  # noqa: PLC0415

    try:
        roles.grant(migration_url(), role, os.environ.get("MOORING_DATABASE_ROLE_PASSWORD") or None)
    except roles.UnfitRole as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{role} can run the server; it can add to the audit log but not change it")


def _current() -> str:
    from sqlalchemy import create_engine  # noqa: PLC0415

    from mooring.db import migrate  # noqa: PLC0415
    from mooring.db.session import normalized  # noqa: PLC0415

    engine = create_engine(normalized(migration_url()))
    try:
        return migrate.current(engine) or "no revision"
    finally:
        engine.dispose()
