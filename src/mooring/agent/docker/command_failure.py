"""Whether a container's command was found, when its first process is Docker's own `docker-init`.

docker-init reaps zombies and passes SIGTERM on, so a stop need not wait for the grace period of a program
that is not made to be process 1. Its price: the engine has started a container even if the command in it
does not exist, and the container ends at once with 127, as a shell's "not found" does. So we look.
"""

import logging
import re
import time
from pathlib import Path

from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.errors import start_failure
from mooring.agent.docker.streams import Demultiplexer
from mooring.core.instance.state import Reason

_NOT_FOUND_CODES = {126, 127}
_LOOK_EVERY_S = 0.001
# Measured: under 5 ms on an idle machine, over 0.3 s on a busy one. Only a start that slow waits for so long.
_PATIENCE_S = 3.0
_ENGINE_NOTICES_S = 5.0
_FATAL = re.compile(r"\[FATAL +tini \(\d+\)\] (exec .* failed: .*)")

log = logging.getLogger(__name__)


def ended_at_once(pid: int, proc: Path = Path("/proc")) -> bool:
    """Wait until docker-init has become the parent of the command; true if it ended instead."""
    if not (proc / "thread-self" / "children").exists():
        return False  # a kernel without CONFIG_PROC_CHILDREN: not known
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if pid == 0 or _has_ended(pid, proc):
            return True
        try:
            if _runs_something_else(pid, proc):
                return False
        except PermissionError:
            return False  # not ours to look at, so not known
        except OSError:
            log.debug("process %s or its child ended between two looks", pid)
        time.sleep(_LOOK_EVERY_S)
    return False


def why_not_run(engine: Engine, inspected: Document, command: list[str]) -> Reason | None:
    """Why the command of an ended container never ran, in docker-init's words; None if it did run.

    Raises:
        RuntimeUnavailable: the engine went away.
    """
    if inspected["State"]["ExitCode"] not in _NOT_FOUND_CODES:
        return None
    match = _FATAL.search(_last_words(engine, inspected["Id"]))
    return start_failure(match.group(1), command) if match else None


def wait_for_end(engine: Engine, container_id: str) -> None:
    """Until the engine, too, knows that the container's process has ended."""
    engine.wait(container_id, _ENGINE_NOTICES_S)


def _has_ended(pid: int, proc: Path) -> bool:
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _runs_something_else(pid: int, proc: Path) -> bool:
    """Whether it has a child that no longer is a copy of itself.

    Its own program is read last: before docker-init it is runc, which has no children, so where there is a
    child the parent is docker-init by now.

    Raises:
        OSError: one of them ended meanwhile, or is not ours to look at.
    """
    children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    programs = {_program(int(child), proc) for child in children}
    return bool(programs - {_program(pid, proc)}) if programs else False


def _program(pid: int, proc: Path) -> tuple[int, int]:
    found = (proc / str(pid) / "exe").stat()
    return found.st_dev, found.st_ino


def _last_words(engine: Engine, container_id: str) -> str:
    stream = engine.stream(
        "GET", f"/containers/{container_id}/logs", params={"stderr": "1", "tail": "5"}, headers_in_s=10
    )
    parts, demultiplexer = [], Demultiplexer()
    try:
        while chunk := stream.read(10):
            parts += [payload for _, payload in demultiplexer.feed(chunk)]
    finally:
        stream.close()
    return b"".join(parts).decode(errors="replace")
