"""Flow control of SSH connections, which asyncssh leaves out: it never waits for a client to read."""

import asyncio
from typing import Any, Final, cast

import asyncssh

# Beyond this many unsent bytes, the gateway reads nothing more from the client, because asyncssh answers many
# messages.
_UNSENT_BYTES: Final = 1024 * 1024
# Beyond this many unparsed bytes too: asyncssh parses nothing while it computes a key exchange, and then all
# at once, in a time that grows with the square of the bytes. A packet has 256 KiB at most.
_UNPARSED_BYTES: Final = 257 * 1024
# asyncssh sends nothing during a key exchange, which the client may begin and never end.
_DEFERRED_PACKETS: Final = 10_000
_CHECK_EVERY_S: Final = 0.02
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
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._connection.data_received(data)
        if len(self._connection._deferred_packets) > _DEFERRED_PACKETS:
            self._connection.abort()
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        transport = self._transport
        assert transport is not None  # it has sent the data
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _UNSENT_BYTES:
            transport.pause_reading()  # until `resume_writing`
        elif len(self._connection._inpbuf) > _UNPARSED_BYTES:
            transport.pause_reading()
            asyncio.get_running_loop().call_later(_CHECK_EVERY_S, self._resume)

    def _resume(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._pause_if_full()

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._writable.set()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._resume()

    async def drained(self) -> None:
        """Wait until the client has read most of what was sent to it."""
        await self._writable.wait()
        while self._connection._deferred_packets and not self._lost:
            await asyncio.sleep(_CHECK_EVERY_S)


def pace_of(connection: asyncssh.SSHServerConnection) -> PacedConnection:
    found: PacedConnection = connection.get_extra_info(_PACE)
    return found
