"""Connections to programs in instances: streams that are opened on demand, and kept for the next request."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from mooring.auth.rate_limits import NodeStreams
from mooring.gateway.ports.callers import PortUser, PortUsers
from mooring.schemas.agent_streams import DialRequest, StreamStatus
from mooring.streams.node_streams import NodeStream, StreamOpener
from mooring_client.stream_messages import MAX_DATA_BYTES, STDIN_CLOSED, STDOUT_CLOSED, Channel

# Of a project on one node.
STREAMS_PER_PROJECT_AND_NODE: Final = 256
# Common servers end an idle connection after five seconds.
IDLE_S: Final = 4.0
# For requests that cannot be repeated: gunicorn, which is the quickest of them, waits two seconds.
FRESH_S: Final = 1.0
_IDLE_PER_USER: Final = 64
_SWEEP_EVERY_S: Final = 1.0

Key = tuple[str, int, str]  # instance, port, credential


class ProgramGone(Exception):
    """The program has ended the connection."""


class ProgramConnection:
    """A connection to a port of an instance."""

    def __init__(self, key: Key, stream: NodeStream) -> None:
        self.key, self._stream = key, stream
        self.is_reused = False
        self.idle_since = 0.0
        self.has_ended = False  # neither direction goes on
        self._on_revoked: Callable[[], None] | None = None
        self._watching = asyncio.ensure_future(self._watch())

    def used_by(self, on_revoked: Callable[[], None] | None) -> None:
        """Call this when the connection must end, even if the client reads nothing."""
        self._on_revoked = on_revoked

    async def _watch(self) -> None:
        await self._stream.revoked.wait()
        if self._on_revoked is not None:
            self._on_revoked()

    def is_silent(self) -> bool:
        """Whether the program waits for a request."""
        return not self.has_ended and self._stream.is_silent()

    async def receive(self) -> bytes:
        """Wait for data; empty: the program sends no more.

        Raises:
            ProgramGone: the connection was lost, or may not go on; the program may have sent more.
        """
        while not self.has_ended:
            found = await self._stream.receive()
            if isinstance(found, StreamStatus):
                self.has_ended = True
                if found.reason is not None:
                    raise ProgramGone
                break
            channel, data = found
            if channel is Channel.CLOSE and data == STDOUT_CLOSED[1:]:
                break
            if channel is Channel.STDOUT and data:
                return data
        return b""

    async def send(self, data: bytes) -> None:
        """Wait until the node has taken the data. Raises ProgramGone."""
        for start in range(0, len(data), MAX_DATA_BYTES):
            if not await self._stream.send(Channel.STDIN, data[start : start + MAX_DATA_BYTES]):
                raise ProgramGone

    async def end_input(self) -> None:
        """The client sends no more."""
        await self._stream.send(Channel.CLOSE, STDIN_CLOSED[1:])

    async def close(self) -> None:
        self._on_revoked = None
        self._watching.cancel()
        await self._stream.close()


class Programs:
    """Opens connections to programs, and keeps idle ones. For the event loop's thread only."""

    def __init__(self, opener: StreamOpener, users: PortUsers) -> None:
        self._opener, self._users = opener, users
        self._limit = NodeStreams(STREAMS_PER_PROJECT_AND_NODE)
        self._idle: dict[Key, list[ProgramConnection]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def connection(self, user: PortUser, *, idle_at_most_s: float) -> ProgramConnection:
        """A connection that this user has used, else a new one.

        Args:
            idle_at_most_s: how long a used one may have been idle; 0: only a new one.

        Raises:
            NotFound, Forbidden, NotRunning, NodeUnreachable, NodeTimeout, TooManyStreamsOnNode: as
                `StreamOpener.open`.
        """
        key = user.port.instance_id, user.port.port, user.key
        before = asyncio.get_running_loop().time() - idle_at_most_s
        # The last one was idle for the shortest time.
        while (waiting := self._idle.get(key)) and waiting[-1].idle_since > before:
            connection = waiting.pop()
            if not waiting:
                del self._idle[key]
            if connection.is_silent():
                connection.is_reused = True
                return connection
            self.discard(connection)
        requested = DialRequest(port=user.port.port)
        target = await self._opener.find(user.live.access, user.port.instance_id, requested)
        live = self._users.audited(user)
        stream = await self._opener.open(live, target, requested, self._limit.opened)
        self._users.opened(user)
        return ProgramConnection(key, stream)

    def keep(self, connection: ProgramConnection) -> None:
        """The program has answered, and waits for the next request."""
        connection.used_by(None)
        waiting = self._idle.setdefault(connection.key, [])
        if len(waiting) >= _IDLE_PER_USER or not connection.is_silent():
            self.discard(connection)
            return
        connection.idle_since = asyncio.get_running_loop().time()
        waiting.append(connection)

    def discard(self, connection: ProgramConnection) -> None:
        """Close the connection without waiting."""
        connection.used_by(None)
        task = asyncio.ensure_future(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def sweep(self) -> None:
        """Close connections that were idle for long, or have ended. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            before = asyncio.get_running_loop().time() - IDLE_S
            for key, waiting in list(self._idle.items()):
                kept = [each for each in waiting if each.idle_since > before and each.is_silent()]
                for each in waiting:
                    if each not in kept:
                        self.discard(each)
                if kept:
                    self._idle[key] = kept
                else:
                    del self._idle[key]

    async def close(self) -> None:
        """Close all idle connections, and wait until all are closed."""
        for waiting in self._idle.values():
            for each in waiting:
                self.discard(each)
        self._idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*self._closing, return_exceptions=True)
