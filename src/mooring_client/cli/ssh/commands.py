"""`mooring ssh`, and `mooring ssh-config` for plain `ssh`, scp, rsync and editors."""

import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from mooring_client.cli.completion import InstanceArgument
from mooring_client.cli.session import connect, find_instance, say
from mooring_client.cli.ssh import access as ssh_access
from mooring_client.cli.ssh.options import configuration, include_in, options, way_to
from mooring_client.failures import BadAnswer

IdentityOption = Annotated[
    Path | None, typer.Option("--identity", "-i", help="your own key, instead of one that is made for this")
]
ViaOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="the gateway's WebSocket, wss://HOST/v1/ssh, instead of its SSH port"),
]


def ssh(
    instance: InstanceArgument,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- [SSH OPTIONS] [CMD]...]", help="as those of ssh")
    ] = None,
    identity: IdentityOption = None,
    via: ViaOption = None,
) -> None:
    """Log in to an instance, or run a command in it, with OpenSSH. Exit with its exit code.

    mooring ssh train-1 -- -L 8888:localhost:8888
    """
    program = ssh_access.program("ssh")
    checked = via and ssh_access.websocket_url(via)
    with connect() as client, ssh_access.explained_files():
        found = find_instance(client, instance)
        key = ssh_access.local_key(identity)
        access = ssh_access.current_access(client.endpoint, key, lambda: nullcontext(client))
    # The ID means one instance; a name may mean several, in several projects.
    if not re.fullmatch("ins_[a-z0-9]+", found["id"]):
        raise BadAnswer(f"{found['id']!r} is no ID of an instance")
    lines = options(access, key, found["id"], way_to(access, checked))
    argv = ["ssh", *(part for line in lines for part in ("-o", line)), access.host, *(arguments or ())]
    # Python ignores it, which programs inherit.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.flush()
    os.execv(program, argv)  # noqa: S606


def ssh_config(
    context: typer.Context,
    write: Annotated[
        bool, typer.Option("--write", help="write them, and include them in ~/.ssh/config")
    ] = False,
    identity: IdentityOption = None,
    via: ViaOption = None,
) -> None:
    """Print lines for ~/.ssh/config with which `ssh NAME.mooring` works, and scp, rsync and editors.

    They hold for instances of any time: the certificate and the address are renewed at each connection.
    """
    ssh_access.program("ssh")
    chosen = context.find_root().params["context"] or os.environ.get("MOORING_CONTEXT")
    prepare = ["--identity", str(identity.expanduser().absolute())] if identity else []
    prepare += ["--via", ssh_access.websocket_url(via)] if via else []
    text = configuration(["--context", chosen] if chosen else [], prepare)
    with ssh_access.explained_files():
        key = ssh_access.local_key(identity)
        with connect() as client:
            ssh_access.renewed_access(client, key)
        if not write:
            print(text, end="")
            return
        file = ssh_access.folder() / "config"
        ssh_access.write_private(file, text)
        user_file = Path.home() / ".ssh" / "config"
        added = include_in(user_file, file)
    say(f"wrote {file}; {user_file} {'now includes' if added else 'includes'} it: ssh NAME.mooring")
