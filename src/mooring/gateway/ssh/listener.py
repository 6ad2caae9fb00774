"""How SSH clients reach the gateway: its own port, or a WebSocket through the port of HTTPS."""

import asyncio
import socket
from contextlib import suppress
from typing import Any, Final

import asyncssh
from starlette.websockets import WebSocket, WebSocketDisconnect

from mooring.core.stream_messages import TCP_SUBPROTOCOL
from mooring.gateway.ssh.connections import SshConnection
from mooring.gateway.ssh.shared import SshShared
from mooring.streams.tasks import cancelled
from mooring.streams.websockets import disconnect

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
_READ_BYTES: Final = 64 * 1024


class SshListener:
    """Accepts SSH clients."""

    def __init__(self, shared: SshShared, host_key: asyncssh.SSHKey) -> None:
        self._shared = shared
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._options: dict[str, Any] = {
            "server_host_keys": [host_key],
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

    async def listen(self, host: str, port: int) -> None:
        """Raises OSError: cannot use the address."""
        self._acceptor = await asyncssh.listen(
            host, port, server_factory=lambda: SshConnection(self._shared), **self._options
        )

    def close(self) -> None:
        """Accept no more clients."""
        if self._acceptor is not None:
            self._acceptor.close()

    async def serve(self, websocket: WebSocket) -> None:
        """Serve a client that sends SSH's bytes in messages, as its `ProxyCommand` does."""
        await websocket.accept(
            TCP_SUBPROTOCOL if TCP_SUBPROTOCOL in websocket.scope["subprotocols"] else None
        )
        address = websocket.client.host if websocket.client else None
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        connecting = asyncio.create_task(self._connect(theirs, address))
        tasks = {
            connecting,
            asyncio.create_task(_copy_to_client(reader, websocket)),
            asyncio.create_task(_copy_from_client(websocket, writer)),
        }
        try:
            await asyncio.wait(tasks - {connecting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(*tasks)
            writer.close()
            await disconnect(websocket)

    async def _connect(self, connection: socket.socket, address: str | None) -> None:
        with suppress(asyncssh.Error, OSError):  # the client did not log in
            await asyncssh.run_server(
                connection, server_factory=lambda: SshConnection(self._shared, address), **self._options
            )


async def _copy_to_client(reader: asyncio.StreamReader, websocket: WebSocket) -> None:
    while data := await reader.read(_READ_BYTES):
        await websocket.send_bytes(data)


async def _copy_from_client(websocket: WebSocket, writer: asyncio.StreamWriter) -> None:
    with suppress(WebSocketDisconnect, OSError):
        async for data in websocket.iter_bytes():
            writer.write(data)
            await writer.drain()
