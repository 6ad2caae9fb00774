"""The output of simulated containers: a log line for each second, and the results of a few commands."""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, NamedTuple

from mooring.agent.runtime import Container
from mooring.agent.timestamps import rfc3339
from mooring.schemas.agent_streams import LogsRequest, StreamFrame

MAX_LINES: Final = 1000

NOT_RUNNING: Final = StreamFrame.of_error("not_running", "The instance has no running container")
NOT_FOUND: Final = StreamFrame.of_error("not_found", "The instance no longer has a container")


class _Line(NamedTuple):
    number: int
    at: float
    text: str


def line_frames(
    current: Callable[[], Container | None],
    now: Callable[[], float],
    wait: Callable[[], None],
    request: LogsRequest,
) -> Iterator[StreamFrame]:
    """The log so far and, with `follow`, new lines. `wait` is called before each check for new lines."""
    since = _unix(request.since) if request.since else 0.0
    next_number, tail = 0, request.tail
    while True:
        container = current()
        if container is None:
            yield NOT_FOUND
            return
        lines = [one for one in _lines(container, now()) if one.number >= next_number and one.at >= since]
        for line in lines if tail is None else lines[max(0, len(lines) - tail) :]:
            yield StreamFrame(stream="stdout", at=rfc3339(line.at), text=line.text)
        if not request.follow or container.status != "running":
            yield StreamFrame(end=True)
            return
        if lines:
            next_number, tail = lines[-1].number + 1, None
        yield StreamFrame()
        wait()


def exec_frames(container: Container | None, command: list[str]) -> Iterator[StreamFrame]:
    """The command's output in one frame, and its exit code."""
    if container is None or container.status != "running":
        yield NOT_RUNNING
        return
    text, exit_code = _output_and_exit_code(container, command)
    if text:
        yield StreamFrame(stream="stdout", text=text)
    yield StreamFrame(exit_code=exit_code)


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


def _output_and_exit_code(container: Container, command: list[str]) -> tuple[str, int]:
    if command[0] == "nvidia-smi":
        gpus = enumerate(container.gpu_uuids)
        return "".join(f"GPU {index}: simulated (UUID: {uuid})\n" for index, uuid in gpus), 0
    in_shell = command[:2] == ["sh", "-c"] and len(command) > 2
    line = command[2] if in_shell else " ".join(command)
    if line.startswith("echo "):
        return f"{line.removeprefix('echo ')}\n", 0
    if ends := re.fullmatch(r"exit (\d{1,3})", line):
        return "", int(ends[1])
    if line in {"true", "false"}:
        return "", int(line == "false")
    return f"simulated: {line}\n", 0


def _unix(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()
