"""Copies between an SSH channel and the stream of a node, in both directions, without buffers that grow."""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, Final, Protocol

import asyncssh

from mooring.gateway.ssh.windows import LARGE_WINDOW, SMALL_WINDOW, Windows
from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.node_streams import NodeStream
from mooring.streams.tasks import cancelled
from mooring_client.errors import MooringError
from mooring_client.stream_messages import STDIN_CLOSED, STDOUT_CLOSED, Channel

# Of input for the instance; then the client's window does not open again, and the client has to wait.
_BUFFERED_BYTES: Final = 256 * 1024
_SMALL_BYTES: Final = 4096
# If more input than this waits, it is an upload, not typing.
_BUSY_BYTES: Final = 8192
# What a piece of input needs besides its bytes.
_PIECE_BYTES: Final = 128
# How long a client that does not read may take to read the last message.
_STATUS_WITHIN_S: Final = 2.0
_CLOSE_CHECK_EVERY_S: Final = 1.0

SshChannel = asyncssh.SSHServerChannel[bytes] | asyncssh.SSHTCPChannel[bytes]

log = logging.getLogger(__name__)


class JoinedPieces(list[tuple[bytes, Any]]):
    """What asyncssh keeps while reading is paused. It joins small pieces: a client may send single bytes."""

    def append(self, piece: tuple[bytes, Any]) -> None:
        if self and self[-1][1] == piece[1] and len(self[-1][0]) < _SMALL_BYTES:
            self[-1] = (self[-1][0] + piece[0], piece[1])
        else:
            super().append(piece)


class ChannelOwner(Protocol):
    """The connection of a channel."""

    @property
    def windows(self) -> Windows: ...

    @property
    def is_ending(self) -> bool:
        """Whether the gateway ends the connection."""

    def used(self) -> None:
        """Called for data in each direction."""

    def closed(self) -> None:
        """Called once the channel is closed and nothing more is copied."""

    async def drained(self) -> None:
        """Wait until the client has read most of what the connection has sent."""


class Copying(ABC):
    """The callbacks of asyncssh that commands and forwarded connections have in common.

    Attributes:
        delivered_within_s: how long the program may take to read its input after the client has closed the
            channel; 0: the stream ends at once.
    """

    delivered_within_s = 0.0

    def __init__(self, owner: ChannelOwner) -> None:
        self._owner = owner
        self.chan: SshChannel | None = None
        self._input: asyncio.Queue[tuple[Channel, bytes]] = asyncio.Queue()
        self._buffered = 0
        self._most_buffered = SMALL_WINDOW
        self._paused = self._resuming = False
        self._close_check: asyncio.TimerHandle | None = None
        self._latest: dict[Channel, bytes] = {}
        self._once: set[tuple[Channel, bytes]] = set()
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = asyncio.Event()
        self._has_all_input = self._is_aborted = False
        self._project: str | None = None  # once the stream is open
        self._has_large_window = False
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False

    # Callbacks of asyncssh.

    def connection_made(self, chan: Any) -> None:
        self.chan = chan
        chan._recv_buf = JoinedPieces(chan._recv_buf)

    def session_started(self) -> None:
        self._task = asyncio.create_task(self._guarded())
        self._task.add_done_callback(self._ended)

    def data_received(self, data: bytes, datatype: Any) -> None:
        self._owner.used()
        self._put_input(data)
        if self._buffered > _BUSY_BYTES:
            self._take_large_window()
        self._pause_if_full()

    def eof_received(self) -> bool:
        self.put(Channel.CLOSE, STDIN_CLOSED[1:])
        return True  # the other direction stays open

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        chan = self._channel
        # The client has closed the channel or its input, and nothing of it was dropped.
        self._has_all_input = chan._recv_state != "open" and not (self._is_aborted or self._owner.is_ending)
        for data, _datatype in chan._recv_buf:
            self._put_input(data)
        self._paused = False
        if self._close_check is not None:
            self._close_check.cancel()
        self._writable.set()  # what is left is dropped
        self.lost.set()
        if self._task is None or self._has_ended:
            self._owner.closed()

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._has_ended = True
        if self.lost.is_set():
            self._owner.closed()

    # What a subclass adds.

    @abstractmethod
    async def open(self) -> NodeStream:
        """Raises MooringError: why no stream can be opened."""

    @abstractmethod
    def write(self, channel: Channel, data: bytes) -> None:
        """Write output to the client."""

    @abstractmethod
    def end(self, status: StreamStatus) -> None:
        """Tell the client how the stream ended, and close the channel."""

    # Copying.

    @property
    def _channel(self) -> SshChannel:
        assert self.chan is not None  # asyncssh calls `connection_made` first
        return self.chan

    def abort(self) -> None:
        """Close the channel, and drop the input that waits."""
        self._is_aborted = True
        self._channel.abort()

    def put(self, channel: Channel, data: bytes) -> None:
        self._input.put_nowait((channel, data))

    def _put_input(self, data: bytes) -> None:
        self.put(Channel.STDIN, data)
        self._buffered += len(data) + _PIECE_BYTES

    def put_latest(self, channel: Channel, data: bytes) -> None:
        """Replace what is still queued on this channel.

        For messages that need no room in the client's window, so that it can send them without end.
        """
        if channel not in self._latest:
            self.put(channel, b"")
        self._latest[channel] = data

    def put_once(self, channel: Channel, data: bytes) -> None:
        """Queue a message that needs no room in the client's window, unless the same is still queued."""
        if (channel, data) not in self._once:
            self._once.add((channel, data))
            self.put(channel, data)

    async def _guarded(self) -> None:
        try:
            await self._run()
        except Exception:
            log.exception("an SSH channel ends, because copying failed")
            self.abort()

    async def _run(self) -> None:
        opening = asyncio.ensure_future(self.open())
        gone = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({opening, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return
            stream = await opening
        except MooringError as error:
            self.end(StreamStatus.of_error(error.code, error.message))
            return
        finally:
            gone.cancel()
            if not opening.done():
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
        self._project = stream.target.project_id
        try:
            await self._copy(stream)
        finally:
            self._input = asyncio.Queue()
            self._project = None  # no large window any more
            if self._has_large_window:
                self._owner.windows.give_back(stream.target.project_id)
            await stream.close()

    def _take_large_window(self) -> None:
        """The client sends more than keys. asyncssh tells it with the next data."""
        if self._project is None or self._has_large_window:
            return
        if self._owner.windows.take(self._project):
            self._has_large_window = True
            self._most_buffered = _BUFFERED_BYTES
            self._channel._init_recv_window = LARGE_WINDOW

    async def _copy(self, stream: NodeStream) -> None:
        output = asyncio.ensure_future(self._copy_output(stream))
        received = asyncio.ensure_future(self._copy_input(stream))
        gone = asyncio.ensure_future(self.lost.wait())
        revoked = asyncio.ensure_future(stream.revoked.wait())
        tasks: set[asyncio.Future[Any]] = {output, received, gone, revoked}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                if self._has_all_input and self.delivered_within_s:
                    await self._deliver(output, revoked)
                return
            async with asyncio.timeout(_STATUS_WITHIN_S):
                self.end(await output)
        except TimeoutError:
            self.abort()
        finally:
            await cancelled(*tasks)

    async def _deliver(self, *ends: asyncio.Future[Any]) -> None:
        """Wait until the program has read all and ended, as after a TCP client has closed its socket."""
        self.put(Channel.CLOSE, STDIN_CLOSED[1:])
        await asyncio.wait(ends, timeout=self.delivered_within_s, return_when=asyncio.FIRST_COMPLETED)

    async def _copy_output(self, stream: NodeStream) -> StreamStatus:
        while not isinstance(found := await stream.receive(), StreamStatus):
            channel, data = found
            if self._channel.is_closing():
                continue  # nobody reads it
            if channel is Channel.CLOSE and data == STDOUT_CLOSED[1:]:
                self._channel.write_eof()
            elif data and channel in {Channel.STDOUT, Channel.STDERR}:
                self._owner.used()
                self.write(channel, data)
                await self._writable.wait()
                await self._owner.drained()  # a client may have opened a window of 4 GiB
        return found

    async def _copy_input(self, stream: NodeStream) -> None:
        while True:
            channel, data = await self._input.get()
            data = self._latest.pop(channel, data)
            self._once.discard((channel, data))
            if channel is Channel.STDIN:
                self._buffered -= len(data) + _PIECE_BYTES
            if not await stream.send(channel, data):
                await asyncio.Event().wait()  # the output ends too, with the reason
            if self._paused and self._buffered < self._most_buffered:
                self._resume()

    def _pause_if_full(self) -> None:
        if self._buffered >= self._most_buffered and not self._resuming:
            self._paused = True
            self._channel.pause_reading()
            self._check_close_later()

    def _check_close_later(self) -> None:
        if self._close_check is None:
            loop = asyncio.get_running_loop()
            self._close_check = loop.call_later(_CLOSE_CHECK_EVERY_S, self._check_close)

    def _check_close(self) -> None:
        """While reading is paused, asyncssh does not say that the client has closed the channel."""
        self._close_check = None
        if self._channel._recv_state == "close_pending":
            self._writable.set()
            asyncio.get_running_loop().call_later(self.delivered_within_s, self.abort)
        elif self._paused:
            self._check_close_later()

    def _resume(self) -> None:
        """Take all that waits in asyncssh, which is a window at most, and only then pause again.

        asyncssh opens the whole window with the first data that it delivers, even if more is waiting. A pause
        after that data would let a fast client fill the memory.
        """
        self._paused, self._resuming = False, True
        self._channel.resume_reading()
        self._resuming = False
        self._pause_if_full()
