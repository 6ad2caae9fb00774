"""The output of simulated containers: a log line for each second, and the results of a few commands."""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final

from mooring.agent.runtime import Container
from mooring.agent.timestamps import rfc3339
from mooring.schemas.agent_streams import LogsRequest, StreamError, StreamFrame

MAX_LINES: Final = 1000

NOT_RUNNING: Final = StreamFrame(
    error=StreamError(code="not_running", message="The instance has no running container")
)
NOT_FOUND: Final = StreamFrame(
    error=StreamError(code="not_found", message="The instance no longer has a container")
)


def line_frames(
    container: Callable[[], Container | None],
    now: Callable[[], float],
    wait: Callable[[], None],
    request: LogsRequest,
) -> Iterator[StreamFrame]:
    """The log so far and, with `follow`, from then on. `wait` returns at least once a second."""
    since = _unix(request.since) if request.since else 0.0
    last = -1
    while True:
        found = container()
        if found is None:
            yield NOT_FOUND
            return
        lines = [line for line in _lines(found, now()) if line[0] > last and line[1] >= since]
        shown = lines if request.tail is None or last >= 0 else lines[max(0, len(lines) - request.tail) :]
        for number, at, text in shown:
            last = number
            yield StreamFrame(stream="stdout", at=rfc3339(at), text=text)
        if not request.follow or found.status != "running":
            yield StreamFrame(end=True)
            return
        last = max([last, *(number for number, _, _ in lines)])
        yield StreamFrame()
        wait()


def exec_frames(container: Container | None, command: list[str]) -> Iterator[StreamFrame]:
    """The command's output in one frame, and its exit code."""
    if container is None or container.status != "running":
        yield NOT_RUNNING
        return
    text, exit_code = _result(container, command)
    if text:
        yield StreamFrame(stream="stdout", text=text)
    yield StreamFrame(exit_code=exit_code)


def _lines(container: Container, now: float) -> Iterator[tuple[int, float, str]]:
    """Number, time and text of the newest lines."""
    if container.started_at is None:
        return
    began = _unix(container.started_at)
    until = _unix(container.finished_at) if container.finished_at else now
    count = int(until - began) + 1
    for number in range(max(0, count - MAX_LINES), count):
        text = f"step {number}  loss {2.5 / (1 + number / 20):.4f}"
        if number == 0:
            text = f"simulated: nothing runs here, on {len(container.gpu_uuids)} GPUs"
        yield number, began + number, text


def _result(container: Container, command: list[str]) -> tuple[str, int]:
    program, *arguments = command
    line = (
        arguments[1]
        if program == "sh" and arguments[:1] == ["-c"] and len(arguments) > 1
        else " ".join(command)
    )
    if program == "nvidia-smi":
        return "".join(
            f"GPU {n}: simulated (UUID: {uuid})\n" for n, uuid in enumerate(container.gpu_uuids)
        ), 0
    if line.startswith("echo "):
        return f"{line.removeprefix('echo ')}\n", 0
    if ends := re.fullmatch(r"exit (\d{1,3})", line):
        return "", int(ends[1])
    if line in {"true", "false"}:
        return "", int(line == "false")
    return f"simulated: {line}\n", 0


def _unix(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()
