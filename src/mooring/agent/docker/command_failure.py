"""Detects that a container's command could not be run, if its first process is Docker's `docker-init`.

docker-init reaps zombies and forwards SIGTERM. Without docker-init, the command is process 1: unless it
handles SIGTERM, the signal has no effect, and a stop takes the whole grace period. But with docker-init, the
engine reports a successful start even if the command cannot be run. The container then exits with 127 if the
command does not exist, with 126 if it may not be executed, and with 1 after any other error, which looks like
an exit of the command itself.
"""

import logging
import re
import time
from pathlib import Path

from mooring.agent.docker.byte_streams import Demultiplexer
from mooring.agent.docker.client import Document, Engine
from mooring.agent.docker.errors import start_failure
from mooring_client.schemas.states import Reason

_NOT_RUN_CODES = {126, 127}
_POLL_S = 0.001
# docker-init takes 5 ms to start the command on an idle machine, and more than 0.3 s on a busy one.
_STARTED_WITHIN_S = 3.0
_END_NOTICED_WITHIN_S = 5.0
_FATAL = re.compile(r"\[FATAL +tini \(\d+\)\] (exec .* failed: .*)")

log = logging.getLogger(__name__)


def ended_at_once(pid: int, proc: Path = Path("/proc")) -> bool:
    """Wait until docker-init has started the command. Return whether docker-init ended instead.

    False if that is unknown. `pid` is docker-init's on the host; 0 if the engine has seen its end.
    """
    if not (proc / "thread-self" / "children").exists():
        return False  # the kernel has no CONFIG_PROC_CHILDREN
    until = time.monotonic() + _STARTED_WITHIN_S
    while time.monotonic() < until:
        if pid == 0 or _has_ended(pid, proc):
            return True
        try:
            if _child_runs_another_program(pid, proc):
                return False
        except PermissionError:
            return False
        except OSError:
            log.debug("process %s or its child ended while it was read", pid)
        time.sleep(_POLL_S)
    return False


def why_not_run(engine: Engine, inspected: Document, command: list[str]) -> Reason | None:
    """Return why the command of an ended container never ran, from docker-init's log; None if it did run.

    Raises:
        RuntimeUnavailable: the engine does not answer.
    """
    if inspected["State"]["ExitCode"] not in _NOT_RUN_CODES:
        return None
    match = _FATAL.search(_stderr_tail(engine, inspected["Id"]))
    return start_failure(match.group(1), command) if match else None


def wait_for_end(engine: Engine, container_id: str) -> None:
    """Wait until the engine has noticed the end of the container's process."""
    engine.wait(container_id, _END_NOTICED_WITHIN_S)


def _has_ended(pid: int, proc: Path) -> bool:
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _child_runs_another_program(pid: int, proc: Path) -> bool:
    """Return whether a child of the process runs another program than the process itself.

    The process is runc, which has no children, until it executes docker-init. Its own program is read last:
    read first, it could be runc, and a child that is still docker-init would run another program.

    Raises:
        OSError: a process has ended, or may not be read.
    """
    children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    programs = {_program_id(int(child), proc) for child in children}
    return bool(programs - {_program_id(pid, proc)}) if programs else False


def _program_id(pid: int, proc: Path) -> tuple[int, int]:
    found = (proc / str(pid) / "exe").stat()
    return found.st_dev, found.st_ino


def _stderr_tail(engine: Engine, container_id: str) -> str:
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
