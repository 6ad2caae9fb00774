"""The streams of simulated containers: a shell, a log line for each second, and a small HTTP server."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, NamedTuple, Self

import h11

from mooring.agent.runtime import Container, StreamRefused
from mooring.agent.simulated.shell import Output, SimulatedShell
from mooring.agent.timestamps import rfc3339
from mooring.schemas.agent_streams import DialRequest, ExecRequest, LogsRequest, StreamStatus, WindowSize
from mooring_client.stream_messages import Channel, joined

MAX_LINES: Final = 1000

Find = Callable[[], Container | None]

_CHECK_EVERY_S: Final = 0.25
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_MAX_UNREAD: Final = 64  # outputs; then typing waits, as at a real program that waits for its reader


def running(container: Container | None) -> Container:
    """Raises StreamRefused: `not_running`."""
    if container is None or container.status != "running":
        raise StreamRefused("not_running", "The instance has no running container")
    return container


class SimulatedStream:
    """A ContainerStream whose output is a queue. Ends with its container.

    Args:
        find: returns the container. Raises RuntimeUnavailable while the engine does not answer.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._outputs: deque[Output] = deque()
        self._changed = asyncio.Condition()
        self._ended: StreamStatus | None = None

    @classmethod
    def ended(cls, find: Find) -> Self:
        """A stream that has ended."""
        stream = cls(find)
        stream._ended = StreamStatus()
        return stream

    async def read(self) -> Output | None:
        while not self._outputs:
            if self._ended is not None:
                return None
            await self._wait(self._check_in_s())
            self._check()
        found = self._outputs.popleft()
        async with self._changed:
            self._changed.notify_all()
        return found

    async def write(self, data: bytes) -> None:
        while len(self._outputs) >= _MAX_UNREAD and self._ended is None:
            await self._wait(None)
        await self._put(self._on_input(data))

    async def end_input(self) -> None:
        await self._put(self._on_input_ended())

    async def resize(self, window: WindowSize) -> None: ...

    async def signal(self, name: str) -> None: ...

    async def status(self) -> StreamStatus:
        return self._ended or StreamStatus()

    async def close(self) -> None:
        self._ended = self._ended or StreamStatus()
        async with self._changed:
            self._changed.notify_all()

    async def _put(self, outputs: Iterator[Output]) -> None:
        if self._ended is None:
            self._outputs.extend(joined(outputs))
            self._after_output()
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, timeout_s: float | None) -> None:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _check_in_s(self) -> float:
        return _CHECK_EVERY_S

    def _check(self) -> None:
        """Called at times while there is no output."""
        container = self._find()
        if container is None or container.status != "running":
            self._ended = StreamStatus(exit_code=137)

    def _on_input(self, data: bytes) -> Iterator[Output]:
        yield from ()

    def _on_input_ended(self) -> Iterator[Output]:
        yield from ()

    def _after_output(self) -> None:
        """Called after each input."""


class SimulatedExec(SimulatedStream):
    def __init__(self, find: Find, request: ExecRequest) -> None:
        super().__init__(find)
        self._shell = SimulatedShell(running(find()), request)
        self._wakes_at: float | None = None
        self._left = request.max_output_bytes or None
        self._truncated = False
        self._outputs.extend(self._shell.begin())
        self._after_output()

    async def resize(self, window: WindowSize) -> None:
        self._shell.resize(window)

    async def signal(self, name: str) -> None:
        await self._put(self._shell.signal(name))

    def _on_input(self, data: bytes) -> Iterator[Output]:
        return self._shell.typed(data)

    def _on_input_ended(self) -> Iterator[Output]:
        if not self._shell.request.tty:  # as with Docker, the end of the input ends no terminal
            yield from self._shell.input_ended()

    def _check_in_s(self) -> float:
        if self._wakes_at is None:
            return _CHECK_EVERY_S
        return max(0.0, min(_CHECK_EVERY_S, self._wakes_at - asyncio.get_running_loop().time()))

    def _check(self) -> None:
        super()._check()
        if self._wakes_at is not None and asyncio.get_running_loop().time() >= self._wakes_at:
            self._wakes_at = None
            self._outputs.extend(self._shell.woken())
            self._after_output()

    def _after_output(self) -> None:
        self._limit_output()
        wakes_in_s = self._shell.wakes_in_s
        if wakes_in_s is None:
            self._wakes_at = None
        elif self._wakes_at is None:
            self._wakes_at = asyncio.get_running_loop().time() + wakes_in_s
        if self._shell.exit_code is not None:
            self._ended = StreamStatus(exit_code=self._shell.exit_code, truncated=self._truncated)

    def _limit_output(self) -> None:
        if self._left is None:
            return
        kept: deque[Output] = deque()
        for channel, data in self._outputs:
            if shown := data[: self._left]:
                kept.append((channel, shown))
            self._truncated = self._truncated or len(shown) < len(data)
            self._left -= len(shown)
        self._outputs = kept


class SimulatedMainShell(SimulatedExec):
    """The main process of a container with an input: a shell, whose end ends the container.

    Args:
        end: ends the container with this exit code.
    """

    def __init__(self, find: Find, request: ExecRequest, end: Callable[[int], None]) -> None:
        self._end = end
        super().__init__(find, request)

    def _after_output(self) -> None:
        super()._after_output()
        if self._shell.exit_code is not None:
            self._end(self._shell.exit_code)


class SimulatedMainProcess(SimulatedStream):
    """The output of a main process without an input: one line. Ends with the container."""

    def __init__(self, find: Find) -> None:
        super().__init__(find)
        container = self._find()
        if container is None:
            raise StreamRefused("not_running", "The instance has no container")
        text = f"simulated: nothing runs here, on {len(container.gpu_uuids)} GPUs\n"
        self._outputs.append((Channel.STDOUT, text.encode()))

    def _check(self) -> None:
        container = self._find()
        if container is None:
            self._ended = StreamStatus.of_error("not_running", "the container of the instance was removed")
        elif container.status != "running":
            self._ended = StreamStatus(exit_code=container.exit_code)


class SimulatedPort(SimulatedStream):
    """An HTTP server that answers every request with one line of text."""

    def __init__(self, find: Find, request: DialRequest) -> None:
        super().__init__(find)
        self._container, self._port = running(find()), request.port
        self._http = h11.Connection(h11.SERVER)
        self._is_head = self._input_ended = False

    def _on_input(self, data: bytes) -> Iterator[Output]:
        try:
            self._http.receive_data(data)
            yield from self._answers()
        except h11.ProtocolError:
            yield Channel.STDOUT, _BAD_REQUEST
            self._input_ended = True

    def _on_input_ended(self) -> Iterator[Output]:
        self._input_ended = True
        yield Channel.CLOSE, bytes([Channel.STDOUT])

    def _answers(self) -> Iterator[Output]:
        while (event := self._http.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            if isinstance(event, h11.Request):
                self._is_head = event.method == b"HEAD"
            elif isinstance(event, h11.EndOfMessage):
                yield Channel.STDOUT, self._answer()
                if self._http.our_state is not h11.DONE:
                    self._input_ended = True
                    return
                self._http.start_next_cycle()

    def _answer(self) -> bytes:
        text = f"simulated: port {self._port} of {self._container.instance_id}\n".encode()
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))]
        events = (
            h11.Response(status_code=200, reason=b"OK", headers=headers),
            h11.Data(data=b"" if self._is_head else text),
            h11.EndOfMessage(),
        )
        return b"".join(self._http.send(each) or b"" for each in events)

    def _after_output(self) -> None:
        if self._input_ended:
            self._ended = StreamStatus()


class _Line(NamedTuple):
    number: int
    at: float
    text: str


class SimulatedLogs(SimulatedStream):
    """The log so far and, with `follow`, new lines."""

    def __init__(self, find: Find, now: Callable[[], float], request: LogsRequest) -> None:
        super().__init__(find)
        self._now, self._follow = now, request.follow
        try:
            self._since = _unix(request.since) if request.since else 0.0
        except ValueError:
            raise StreamRefused("bad_since", "`since` is not a time like 2026-11-21T08:00:00Z") from None
        self._next = 0
        self._add_lines(request.tail)

    def _check(self) -> None:
        self._add_lines(None)

    def _add_lines(self, tail: int | None) -> None:
        container = self._find()
        if container is None:
            raise StreamRefused("not_found", "The instance no longer has a container")
        found = [
            each
            for each in _lines(container, self._now())
            if each.number >= self._next and each.at >= self._since
        ]
        for line in found if tail is None else found[max(0, len(found) - tail) :]:
            self._outputs.append((Channel.STDOUT, f"{rfc3339(line.at)} {line.text}".encode()))
        if found:
            self._next = found[-1].number + 1
        if not self._follow or container.status != "running":
            self._ended = StreamStatus()


def _lines(container: Container, now: float) -> Iterator[_Line]:
    """The newest lines, one for each second since the start."""
    if container.started_at is None:
        return
    began = _unix(container.started_at)
    until = _unix(container.finished_at) if container.finished_at else now
    count = int(until - began) + 1
    for number in range(max(0, count - MAX_LINES), count):
        text = f"step {number}  loss {2.5 / (1 + number / 20):.4f}"
        if number == 0:
            text = f"simulated: nothing runs here, on {len(container.gpu_uuids)} GPUs"
        yield _Line(number, began + number, text)


def _unix(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()
