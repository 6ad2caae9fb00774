"""Where a user who waits for bytes and the node that brings them meet, in this replica's memory."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress

from mooring.schemas.agent_streams import StreamError, StreamFrame

_BUFFERED_FRAMES = 256
_ENDING = StreamFrame(
    error=StreamError(code="server_ending", message="the control plane is being stopped; ask again soon")
)


class Channel:
    """Frames of one stream, from the node's request to the user's. Bounded: a slow reader slows the node."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._frames: asyncio.Queue[StreamFrame | None] = asyncio.Queue(_BUFFERED_FRAMES)
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """The reader is gone: whoever brings frames is told at its next one."""
        self._closed.set()

    async def closed(self) -> None:
        await self._closed.wait()

    def break_off(self) -> None:
        """The process is about to end: tell both sides, and wait for neither."""
        with suppress(asyncio.QueueFull):
            self._frames.put_nowait(_ENDING)
        self.close()

    def revoke(self, error: StreamError) -> None:
        """The reader may read no more: not even what waits for them already."""
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(StreamFrame(error=error))
        self.close()

    async def put(self, frame: StreamFrame | None) -> bool:
        """Bring a frame, None for the end; whether anybody still reads."""
        if not (self.is_closed or self._frames.full()):
            self._frames.put_nowait(frame)
            return True
        putting = asyncio.ensure_future(self._frames.put(frame))
        closing = asyncio.ensure_future(self._closed.wait())
        await asyncio.wait({putting, closing}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (putting, closing):
            waiting.cancel()
        return not self.is_closed

    async def frames(self, silence_s: float) -> AsyncGenerator[StreamFrame]:
        """Frames until the end.

        Raises:
            TimeoutError: nothing came for so long, not even the node's sign of life.
        """
        while True:
            async with asyncio.timeout(silence_s):
                frame = await self._frames.get()
            if frame is None:
                return
            yield frame


class Channels:
    """The open channels of this replica, by the id of their stream."""

    def __init__(self) -> None:
        self._open: dict[str, Channel] = {}

    def find(self, stream_id: str) -> Channel | None:
        return self._open.get(stream_id)

    def break_off(self) -> None:
        for channel in self._open.values():
            channel.break_off()

    @contextmanager
    def opened(self, stream_id: str, node_id: str) -> Iterator[Channel]:
        channel = self._open[stream_id] = Channel(node_id)
        try:
            yield channel
        finally:
            channel.close()
            del self._open[stream_id]
