"""Reads the logs of an instance as frames: one per line, with its time, without control characters (R18)."""

import codecs
import re
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from typing import Final

from mooring.agent.decide.reconcile import ENDED
from mooring.agent.docker.client import Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams import ByteStream, Demultiplexer, StreamName
from mooring.agent.runtime import RuntimeUnavailable
from mooring.core.text import MAX_LINE_BYTES, clean_line
from mooring.schemas.agent_streams import LogsRequest, StreamFrame

KEEP_ALIVE_S: Final = 10.0


def log_frames(engine: Engine, container_id: str, request: LogsRequest) -> Generator[StreamFrame, None, None]:
    """Yield frames; the last one has `end` or `error`. Empty frames keep the connection alive.

    Raises:
        RuntimeUnavailable: the connection to the engine was lost.
    """
    try:
        params = _params(request)
    except ValueError:
        yield StreamFrame.of_error("bad_since", "`since` is not a time like 2026-11-21T08:00:00Z")
        return
    stream = engine.stream("GET", f"/containers/{container_id}/logs", params=params, headers_in_s=10)
    try:
        yield from _lines(stream)
        yield _end(engine, container_id, follow=request.follow)
    except EngineRefused as refusal:
        if refusal.status not in {404, 409}:
            raise
        yield StreamFrame.of_error(
            "not_found", "the container of the instance was removed, and its logs with it"
        )
    finally:
        stream.close()


def engine_time(rfc3339: str) -> str:
    """Convert a time to the engine's notation: seconds and nanoseconds since 1970.

    Raises:
        ValueError: it is not in RFC 3339 notation.
    """
    match = re.fullmatch(r"(.+?:\d\d)(?:\.(\d{1,9}))?\d*(Z|[+-]\d\d:\d\d)?", rfc3339.strip().upper())
    if match is None:
        raise ValueError(rfc3339)
    whole, fraction, zone = match.groups()
    at = datetime.fromisoformat(whole + (zone or "Z")).astimezone(UTC)
    return f"{int(at.timestamp())}.{(fraction or '').ljust(9, '0')}"


class LineCutter:
    """Truncates lines of more than 16 KiB, which the engine sends in parts, to their first part."""

    def __init__(self) -> None:
        self._cut: set[StreamName] = set()  # streams whose current line was truncated

    def frame(self, stream: StreamName, payload: bytes) -> StreamFrame | None:
        """Return the frame of a line; None for a further part of a truncated line."""
        at, _, line = payload.partition(b" ")
        complete = line.endswith(b"\n")
        if stream in self._cut:
            if complete:
                self._cut.discard(stream)
            return None
        text = line.rstrip(b"\r\n")
        truncated = len(text) > MAX_LINE_BYTES or (not complete and len(text) == MAX_LINE_BYTES)
        if not complete and truncated:
            self._cut.add(stream)
        # `final` replaces an incomplete character at the end. In a truncated line, it is dropped instead.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoded = clean_line(decoder.decode(text[:MAX_LINE_BYTES], final=not truncated))
        return StreamFrame(stream=stream, at=at.decode(errors="replace"), text=decoded, truncated=truncated)


def _params(request: LogsRequest) -> dict[str, str]:
    params = {
        "stdout": "1",
        "stderr": "1",
        "timestamps": "1",
        "follow": "1" if request.follow else "0",
        "tail": "all" if request.tail is None else str(request.tail),
    }
    return params | ({"since": engine_time(request.since)} if request.since else {})


def _lines(stream: ByteStream) -> Iterator[StreamFrame]:
    demultiplexer, cutter = Demultiplexer(), LineCutter()
    while (chunk := stream.read(KEEP_ALIVE_S)) != b"":
        if chunk is None:
            yield StreamFrame()
            continue
        for name, payload in demultiplexer.feed(chunk):
            if (frame := cutter.frame(name, payload)) is not None:
                yield frame


def _end(engine: Engine, container_id: str, *, follow: bool) -> StreamFrame:
    # An engine that shuts down ends its streams as if the containers had ended.
    if follow and (status := engine.container(container_id)["State"]["Status"]) not in ENDED:
        raise RuntimeUnavailable(f"the engine ended the logs of a container that is {status}")
    return StreamFrame(end=True)
