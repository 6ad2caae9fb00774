"""What OpenSSH runs: `ssh-prepare` before each connection, and `ssh-proxy` as the connection if necessary.

Both import little: they run for each connection.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooring_client.failures import ClientFailure, StreamInterrupted

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_READ_BYTES: Final = 64 * 1024
_OPEN_WITHIN_S: Final = 20
# Below the 60 s after which many proxies close a silent connection.
_PING_INTERVAL_S: Final = 20


def ssh_prepare(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="NAME.mooring or NAME.PROJECT.mooring")],
    identity: Annotated[Path | None, typer.Option("--identity", "-i")] = None,
    via: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Renew the certificate, and write OpenSSH's options of a host name. `Match exec` runs it."""
    from mooring_client.cli.session import connect
    from mooring_client.cli.ssh import access as ssh_access
    from mooring_client.cli.ssh.options import options, user_of, way_to, write_host
    from mooring_client.endpoint import resolve

    user = user_of(host)
    endpoint = resolve(context=context.find_root().params["context"])
    with ssh_access.explained_files():
        key = ssh_access.local_key(identity)
        access = ssh_access.current_access(endpoint, key, lambda: connect(timeout_s=10, max_retries=1))
        write_host(host, options(access, key, user, way_to(access, via)))


def ssh_proxy(url: Annotated[str, typer.Argument(help="wss://HOST/v1/ssh")]) -> None:
    """Pass SSH through a WebSocket, where a gateway's SSH port cannot be reached. OpenSSH runs it."""
    from websockets.exceptions import ConnectionClosed

    websocket = _opened(url)
    threading.Thread(target=_send_input, args=(websocket,), name="input", daemon=True).start()
    try:
        for data in websocket:
            _write_all(data if isinstance(data, bytes) else data.encode())
    except ConnectionClosed as error:
        raise StreamInterrupted(f"the connection to {url} was lost: {error}") from None


def _opened(url: str) -> "ClientConnection":
    """Raises ClientFailure: there is no gateway."""
    from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
    from websockets.sync.client import connect

    from mooring_client.stream_messages import MAX_MESSAGE_BYTES, TCP_SUBPROTOCOL

    try:
        return connect(
            url,
            subprotocols=[TCP_SUBPROTOCOL],  # type: ignore[list-item]  # a NewType of str
            compression=None,  # SSH's bytes are encrypted
            open_timeout=_OPEN_WITHIN_S,
            close_timeout=1,
            ping_interval=_PING_INTERVAL_S,
            ping_timeout=None,  # SSH itself notices a lost connection; a slow one may delay an answer
            max_size=MAX_MESSAGE_BYTES,
        )
    except InvalidStatus as rejection:
        why = f"it answers {rejection.response.status_code}"
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        why = str(error)
    raise ClientFailure(
        f"no gateway at {url}: {why} (SSH takes this way where the gateway's SSH port cannot be reached)"
    )


def _send_input(websocket: "ClientConnection") -> None:
    from websockets.exceptions import ConnectionClosed

    with suppress(ConnectionClosed):  # the reader says why
        while data := os.read(0, _READ_BYTES):
            websocket.send(data)
    websocket.close()


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
