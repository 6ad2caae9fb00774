"""Flow control of SSH connections, which asyncssh leaves out: it never waits for a client to read."""

import asyncio
from typing import Any, Final, cast

import asyncssh

# What the gateway keeps for a client that does not read. Then it reads nothing more from that client either,
# because asyncssh answers many messages.
_UNREAD_BYTES: Final = 1024 * 1024
_PACE: Final = "mooring_pace"


class PacedConnection(asyncio.Protocol):
    """Between a socket and its connection of asyncssh.

    Args:
        connection: asyncssh's own protocol of a socket.
        more: for the connection's `get_extra_info`.
    """

    def __init__(self, connection: asyncssh.SSHServerConnection, **more: Any) -> None:
        self._connection = connection
        connection.set_extra_info(**more, **{_PACE: self})
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._connection.data_received(data)
        assert self._transport is not None  # it has sent the data
        if self._transport.get_write_buffer_size() > _UNREAD_BYTES:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        assert self._transport is not None  # it calls this
        self._transport.resume_reading()

    async def drained(self) -> None:
        """Wait until the client has read most of what was sent to it."""
        await self._writable.wait()


def pace_of(connection: asyncssh.SSHServerConnection) -> PacedConnection:
    found: PacedConnection = connection.get_extra_info(_PACE)
    return found
