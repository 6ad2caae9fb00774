"""OpenSSH's configuration: the options of a connection, and the files with which `ssh NAME.mooring` works.

A certificate must be renewed before OpenSSH reads it, which it does while a ProxyCommand still starts. So
`Match exec` runs `mooring ssh-prepare`, and OpenSSH waits for that. It also writes the options of this name
into a file that is included afterwards: OpenSSH cannot derive `User` from a host name by itself, and only now
is it known whether the gateway's port can be reached. Data passes through a `mooring` process only if not.
"""

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mooring_client.cli.ssh.access import GatewayAccess, LocalKey, folder, gateway_alias, write_private
from mooring_client.failures import ClientFailure, NotConfigured

SUFFIX: Final = ".mooring"
REACHABLE_WITHIN_S: Final = 2.0
_LABEL: Final = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_USER: Final = re.compile(rf"ins_[a-z0-9]+|{_LABEL}(?:\.{_LABEL})?")
# Whatever else the configuration or the user's shell could interpret, in OpenSSH 8 to 10.
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\"'\\%$*?\[\]]")
_FORGOTTEN_AFTER_S: Final = 7 * 86_400


def user_of(host: str) -> str:
    """The user name that means an instance: `box` or `box.project` of `box.mooring`, `box.project.mooring`.

    Raises:
        ClientFailure: the host name has another form.
    """
    name = host.removesuffix(SUFFIX)
    if name == host or not _USER.fullmatch(name):
        raise ClientFailure(f"{host!r} names no instance: write NAME{SUFFIX} or NAME.PROJECT{SUFFIX}")
    return name


def way_to(access: GatewayAccess, via: str | None) -> str | None:
    """The WebSocket to use; None: connect to the SSH port, which can be reached."""
    if via:
        return via
    try:
        socket.create_connection((access.host, access.port), REACHABLE_WITHIN_S).close()
    except OSError:
        return access.websocket_url
    return None


def options(access: GatewayAccess, key: LocalKey, user: str, way: str | None) -> list[str]:
    """The lines of a connection.

    Args:
        way: the WebSocket to use; None: the SSH port.

    Raises:
        NotConfigured: a path has characters that the configuration cannot hold.
    """
    certified = [] if key.is_security_key else [f'CertificateFile "{_safe(access.certificate)}"']
    return [
        f"User {user}",
        f"HostName {access.host}",
        f"Port {access.port}",
        f"HostKeyAlias {gateway_alias(access.name)}",
        f'UserKnownHostsFile "{_safe(access.known_hosts)}"',
        "GlobalKnownHostsFile /dev/null",
        "StrictHostKeyChecking yes",
        "CheckHostIP no",
        "UpdateHostKeys no",
        f'IdentityFile "{_safe(key.private)}"',
        *certified,
        "IdentitiesOnly yes",
        "ServerAliveInterval 30",
        # `none` also keeps a ProxyJump of the user's own file from being used.
        f"ProxyCommand {shlex.join([_program(), 'ssh-proxy', way]) if way else 'none'}",
    ]


def configuration(arguments: Sequence[str], prepare: Sequence[str]) -> str:
    """The lines for ~/.ssh/config.

    Args:
        arguments: of `mooring`, before the command.
        prepare: of `mooring ssh-prepare`.

    Raises:
        NotConfigured: one of them has characters that the configuration cannot hold.
    """
    argv = [_program(), *arguments, "ssh-prepare", *prepare]
    command = shlex.join(_safe(each) for each in argv)
    # Old releases of OpenSSH take any character in a host name. Within quotes, only a quote would matter.
    return f"""\
# Made by `mooring ssh-config`: `ssh NAME{SUFFIX}` and `ssh NAME.PROJECT{SUFFIX}`.
Match originalhost "*{SUFFIX},!*'*" exec "{command} -- '%n'"
    Include "{_safe(_hosts())}/*"
# If that failed, it has said why. Connect to no other host of this name.
Match originalhost "*{SUFFIX}"
    ProxyCommand false
Match all
"""


def write_host(host: str, lines: Sequence[str]) -> None:
    """Write the options of a host name, for the connection that waits for them.

    Each name has a file of its own, so concurrent connections do not disturb each other.
    """
    now = time.time()
    write_private(_hosts() / host, "\n    ".join([f"Host {host}", *lines]) + "\n")
    for file in _hosts().iterdir():
        try:
            if file.stat().st_mtime < now - _FORGOTTEN_AFTER_S:
                file.unlink()
        except FileNotFoundError:  # another process was faster
            continue


def include_in(user_file: Path, file: Path) -> bool:
    """Make OpenSSH read a file too, before the rest of the user's own. Returns whether that is new.

    Raises:
        NotConfigured: the path has characters that the configuration cannot hold.
    """
    line = f'Include "{_safe(file)}"'
    target = user_file.resolve()  # it may be a link into a folder of dotfiles
    content = target.read_bytes().decode(errors="surrogateescape") if target.exists() else ""
    if line in map(str.strip, content.splitlines()):
        return False
    mode = target.stat().st_mode & 0o777 if content else 0o600
    # At the beginning: below a `Host`, it would be read for that host only.
    write_private(target, f"{line}\n\n{content}")
    target.chmod(mode)
    return True


def _hosts() -> Path:
    return folder() / "hosts"


def _program() -> str:
    """The path of this program, for OpenSSH, which starts it with another PATH and in any folder."""
    for each in (Path(sys.argv[0]), Path(sys.executable).with_name("mooring")):
        if each.name == "mooring" and each.is_file() and os.access(each, os.X_OK):
            return _safe(each.absolute())
    raise NotConfigured("cannot find the program `mooring` beside Python; install mooring-client with pip")


def _safe(text: Path | str) -> str:
    if _UNSAFE.search(str(text)):
        raise NotConfigured(f"OpenSSH's configuration cannot hold {str(text)!r}: remove quotes and wildcards")
    return str(text)
