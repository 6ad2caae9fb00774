"""In-memory channels that pass frames from a node's request to a user's."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress

from mooring.schemas.agent_streams import StreamError, StreamFrame

_BUFFERED_FRAMES = 256
_ENDING = StreamFrame.of_error("server_ending", "the control plane is shutting down; try again soon")


class Channel:
    """The frames of one stream. The buffer is bounded: a slow reader slows down the node."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._frames: asyncio.Queue[StreamFrame | None] = asyncio.Queue(_BUFFERED_FRAMES)
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Call this when the reader is gone: the next `put` returns False."""
        self._closed.set()

    async def closed(self) -> None:
        await self._closed.wait()

    def abort(self) -> None:
        """End both sides without waiting for them, because the process shuts down."""
        with suppress(asyncio.QueueFull):
            self._frames.put_nowait(_ENDING)
        self.close()

    def revoke(self, error: StreamError) -> None:
        """Drop the buffered frames and end with this error, because the reader lost access."""
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(StreamFrame(error=error))
        self.close()

    async def put(self, frame: StreamFrame | None) -> bool:
        """Wait for space and add a frame (None: the end). Returns whether the reader is still there."""
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
        """Yield frames until the end.

        Raises:
            TimeoutError: nothing arrived for `silence_s`, not even a keepalive of the node.
        """
        while True:
            async with asyncio.timeout(silence_s):
                frame = await self._frames.get()
            if frame is None:
                return
            yield frame


class Channels:
    """The open channels of this replica, by stream id."""

    def __init__(self) -> None:
        self._open: dict[str, Channel] = {}

    def find(self, stream_id: str) -> Channel | None:
        return self._open.get(stream_id)

    def abort(self) -> None:
        for channel in self._open.values():
            channel.abort()

    @contextmanager
    def opened(self, stream_id: str, node_id: str) -> Iterator[Channel]:
        channel = self._open[stream_id] = Channel(node_id)
        try:
            yield channel
        finally:
            channel.close()
            del self._open[stream_id]
