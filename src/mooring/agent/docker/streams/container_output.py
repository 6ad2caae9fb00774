"""The output of a container or a command, as messages of at most MAX_DATA_BYTES."""

from collections import deque
from collections.abc import Iterator
from typing import Final

from mooring.agent.docker.streams.engine_streams import EngineConnection, HeldConnection
from mooring_client.stream_messages import MAX_DATA_BYTES, Channel, joined

_HEADER_BYTES: Final = 8  # stream number, three zeros, length as four bytes


class ContainerOutput:
    """Reads the engine's stream.

    Args:
        is_raw: it has a terminal, and so its output has no headers.
        max_bytes: further output is read and dropped; 0: no limit.
    """

    def __init__(
        self, connection: EngineConnection | HeldConnection, *, is_raw: bool, max_bytes: int = 0
    ) -> None:
        self.connection, self._is_raw, self._left = connection, is_raw, max_bytes or None
        self._headers = StreamHeaders()
        self._ready: deque[tuple[Channel, bytes]] = deque()
        self.truncated = False

    async def read(self) -> tuple[Channel, bytes] | None:
        while not self._ready:
            chunk = await self.connection.read()
            if not chunk:
                return None
            parts = iter([(Channel.STDOUT, chunk)]) if self._is_raw else self._headers.feed(chunk)
            for channel, data in joined(parts):
                if kept := self._kept(data):
                    self._ready.append((channel, kept))
        return self._ready.popleft()

    def _kept(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        kept = data[: self._left]
        self._left -= len(kept)
        self.truncated = self.truncated or len(kept) < len(data)
        return kept


class StreamHeaders:
    """Splits the engine's stream of a container without a terminal, without waiting for whole frames.

    The engine's header names a length of up to 4 GiB, so a frame may not be buffered.
    """

    def __init__(self) -> None:
        self._header = b""
        self._channel = Channel.STDOUT
        self._left = 0  # of the current frame

    def feed(self, chunk: bytes) -> Iterator[tuple[Channel, bytes]]:
        at = 0
        while at < len(chunk):
            if self._left == 0:
                at = self._read_header(chunk, at)
                continue
            data = chunk[at : at + min(self._left, MAX_DATA_BYTES)]
            at += len(data)
            self._left -= len(data)
            yield self._channel, data

    def _read_header(self, chunk: bytes, at: int) -> int:
        """Take bytes of a header. Return where the rest begins."""
        taken = chunk[at : at + _HEADER_BYTES - len(self._header)]
        self._header += taken
        if len(self._header) == _HEADER_BYTES:
            self._channel = Channel.STDERR if self._header[0] == Channel.STDERR else Channel.STDOUT
            self._left = int.from_bytes(self._header[4:], "big")
            self._header = b""
        return at + len(taken)
