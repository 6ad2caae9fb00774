"""How SSH clients reach the gateway: its own port, or a WebSocket through the port of HTTPS."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import asyncssh
from starlette.websockets import WebSocket, WebSocketDisconnect

from mooring.gateway.ssh.connections import CLIENT_ADDRESS, SshConnection
from mooring.gateway.ssh.pacing import PacedConnection
from mooring.gateway.ssh.shared import SshShared
from mooring.streams.tasks import cancelled
from mooring.streams.websockets import disconnect
from mooring_client.stream_messages import TCP_SUBPROTOCOL

LOGIN_S: Final = 30
_KEEPALIVE_S: Final = 60
_KEEPALIVES: Final = 3
# Without ChaCha20, which OpenSSH prefers: AES takes a quarter less of the gateway's CPU for each byte.
_CIPHERS: Final = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
# Without those that use SHA-1.
_SIGNATURES: Final = (
    "ssh-ed25519", "sk-ssh-ed25519@openssh.com", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521", "sk-ecdsa-sha2-nistp256@openssh.com", "rsa-sha2-256", "rsa-sha2-512",
)  # fmt: skip
_BACKLOG: Final = 100
_READ_BYTES: Final = 64 * 1024


# Takes the address of a client, which asyncssh ignores.
_MakeConnection = Callable[[str, int], asyncssh.SSHServerConnection]


class SshListener:
    """Accepts SSH clients."""

    def __init__(self, shared: SshShared) -> None:
        self._shared = shared
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._server: asyncio.Server | None = None
        self._make_connection: _MakeConnection | None = None
        self._options: dict[str, Any] = {
            "server_factory": lambda: SshConnection(shared),
            "server_host_keys": shared.keys.host,
            # Clients learn the next host key before it is used (UpdateHostKeys).
            "send_server_host_keys": True,
            "server_version": "Mooring",
            "encoding": None,
            "line_editor": False,
            "agent_forwarding": False,
            "x11_forwarding": False,
            "allow_scp": False,
            "login_timeout": LOGIN_S,
            "keepalive_interval": _KEEPALIVE_S,
            "keepalive_count_max": _KEEPALIVES,
            "password_auth": False,
            "kbdint_auth": False,
            "host_based_auth": False,
            "gss_host": None,
            "compression_algs": None,
            "signature_algs": _SIGNATURES,
            "encryption_algs": _CIPHERS,
            "config": None,
        }

    async def prepare(self) -> None:
        """Call this first, once.

        asyncssh accepts a protocol before its own from a tunnel only, so it gets this object as one: it calls
        `create_server` with the function that makes a connection.
        """
        self._acceptor = await asyncssh.listen(tunnel=self, **self._options)

    async def create_server(self, make_connection: _MakeConnection, host: str, port: int) -> "SshListener":
        """Called by asyncssh."""
        self._make_connection = make_connection
        return self

    async def listen(self, host: str, port: int) -> None:
        """Raises OSError: cannot use the address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._paced, host, port, backlog=_BACKLOG)

    def _paced(self, **more: Any) -> PacedConnection:
        assert self._make_connection is not None, "prepare() was not called"
        return PacedConnection(self._make_connection("", 0), **more)

    def keys_changed(self) -> None:
        """Use the present host keys for new clients."""
        assert self._acceptor is not None, "prepare() was not called"
        self._acceptor.update(server_host_keys=self._shared.keys.host)

    def close(self) -> None:
        """Accept no more clients."""
        if self._server is not None:
            self._server.close()

    async def serve(self, websocket: WebSocket) -> None:
        """Serve a client that sends SSH's bytes in messages, as its `ProxyCommand` does."""
        await websocket.accept(
            TCP_SUBPROTOCOL if TCP_SUBPROTOCOL in websocket.scope["subprotocols"] else None
        )
        address = websocket.client.host if websocket.client else None
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(self._paced, **{CLIENT_ADDRESS: address}), theirs
            )
        except BaseException:
            ours.close()
            theirs.close()
            raise
        tasks = {
            asyncio.create_task(_copy_to_client(reader, websocket)),
            asyncio.create_task(_copy_from_client(websocket, writer)),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(*tasks)
            writer.close()
            await disconnect(websocket)


async def _copy_to_client(reader: asyncio.StreamReader, websocket: WebSocket) -> None:
    while data := await reader.read(_READ_BYTES):
        await websocket.send_bytes(data)


async def _copy_from_client(websocket: WebSocket, writer: asyncio.StreamWriter) -> None:
    with suppress(WebSocketDisconnect, OSError):
        async for data in websocket.iter_bytes():
            writer.write(data)
            await writer.drain()
