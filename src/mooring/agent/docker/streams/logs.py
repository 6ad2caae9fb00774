"""Reads the log of a container: a message for each line, with its time, without control characters (R18)."""

import codecs
import re
from collections import deque
from collections.abc import Iterator
from datetime import datetime

from mooring.agent.decide.reconcile import ENDED
from mooring.agent.docker.byte_streams import Demultiplexer
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams.engine_streams import EngineApi, EngineConnection
from mooring.agent.runtime import RuntimeUnavailable, StreamRefused
from mooring.schemas.agent_streams import LogsRequest, StreamStatus, WindowSize
from mooring_client.schemas.text import MAX_LINE_BYTES
from mooring_client.stream_messages import Channel
from mooring_client.terminal_text import clean_line

_MAX_RAW_LINE_BYTES = 64 * 1024
_GONE = "the container of the instance was removed, and its logs with it"


class LogStream:
    """A ContainerStream of log lines, without input."""

    def __init__(
        self,
        engine: EngineApi,
        container_id: str,
        connection: EngineConnection,
        *,
        follow: bool,
        tty: bool = False,
    ) -> None:
        self._engine, self._container_id, self._follow = engine, container_id, follow
        self._connection = connection
        self._parts: Demultiplexer | RawLines = RawLines() if tty else Demultiplexer()
        self._cutter = LineCutter()
        self._lines: deque[tuple[Channel, bytes]] = deque()

    async def read(self) -> tuple[Channel, bytes] | None:
        while not self._lines:
            chunk = await self._connection.read()
            if not chunk:
                return None
            for channel, payload in self._parts.feed(chunk):
                if (line := self._cutter.line(channel, payload)) is not None:
                    self._lines.append((channel, line))
        return self._lines.popleft()

    async def write(self, data: bytes) -> None:
        """Logs take no input."""

    async def end_input(self) -> None: ...

    async def resize(self, window: WindowSize) -> None: ...

    async def signal(self, name: str) -> None: ...

    async def status(self) -> StreamStatus:
        # An engine that shuts down ends its streams as if the containers had ended.
        if self._follow and (status := await self._container_status()) not in ENDED:
            raise RuntimeUnavailable(f"the engine ended the logs of a container that is {status}")
        return StreamStatus()

    async def close(self) -> None:
        self._connection.abort()

    async def _container_status(self) -> str:
        container = await self._engine.request("GET", f"/containers/{self._container_id}/json")
        return str(container["State"]["Status"])


async def open_logs(engine: EngineApi, container_id: str, request: LogsRequest) -> LogStream:
    """Open the log.

    Raises:
        StreamRefused: the container is gone, or `since` is not a time.
        RuntimeUnavailable: the engine does not answer.
    """
    try:
        params = _params(request)
    except ValueError:
        raise StreamRefused("bad_since", "`since` is not a time like 2026-11-21T08:00:00Z") from None
    try:
        tty = bool((await engine.request("GET", f"/containers/{container_id}/json"))["Config"]["Tty"])
        connection = await engine.open("GET", f"/containers/{container_id}/logs", params=params)
    except EngineRefused as refused:
        if refused.status not in {404, 409}:
            raise
        raise StreamRefused("not_found", _GONE) from refused
    return LogStream(engine, container_id, connection, follow=request.follow, tty=tty)


def engine_time(rfc3339: str) -> str:
    """Convert a time to the engine's notation: seconds and nanoseconds since 1970.

    Raises:
        ValueError: it is not in RFC 3339 notation.
    """
    match = re.fullmatch(r"(.+?:\d\d)(?:\.(\d{1,9}))?\d*(Z|[+-]\d\d:\d\d)?", rfc3339.strip().upper())
    if match is None:
        raise ValueError(rfc3339)
    whole, fraction, zone = match.groups()
    at = datetime.fromisoformat(whole + (zone or "Z"))
    return f"{int(at.timestamp())}.{(fraction or '').ljust(9, '0')}"


class RawLines:
    """Splits the log of a container with a terminal, which has no headers, into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[tuple[Channel, bytes]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield Channel.STDOUT, line + b"\n"
        if len(self._rest) > _MAX_RAW_LINE_BYTES:
            yield Channel.STDOUT, self._rest
            self._rest = b""


class LineCutter:
    """Truncates lines of more than 16 KiB, which the engine sends in parts, to their first part."""

    def __init__(self) -> None:
        self._cut: set[Channel] = set()  # channels whose current line was truncated

    def line(self, channel: Channel, payload: bytes) -> bytes | None:
        """Return a line with its time; None for a further part of a truncated line."""
        at, _, line = payload.partition(b" ")
        complete = line.endswith(b"\n")
        if channel in self._cut:
            if complete:
                self._cut.discard(channel)
            return None
        text = line.rstrip(b"\r\n")
        truncated = len(text) > MAX_LINE_BYTES or (not complete and len(text) == MAX_LINE_BYTES)
        if not complete and truncated:
            self._cut.add(channel)
        # `final` replaces an incomplete character at the end. In a truncated line, it is dropped instead.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoded = clean_line(decoder.decode(text[:MAX_LINE_BYTES], final=not truncated))
        return at + b" " + decoded.encode()


def _params(request: LogsRequest) -> dict[str, str]:
    params = {
        "stdout": "1",
        "stderr": "1",
        "timestamps": "1",
        "follow": "1" if request.follow else "0",
        "tail": "all" if request.tail is None else str(request.tail),
    }
    return params | ({"since": engine_time(request.since)} if request.since else {})
