"""Signals to processes of containers, by their pids on the host."""

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from mooring.schemas.agent_streams import SIGNALS

PROC: Final = Path("/proc")
NUMBERS: Final = {name: getattr(signal, f"SIG{name}") for name in SIGNALS}

log = logging.getLogger(__name__)


def kill_tree(pid: int, container_id: str) -> bool:
    """Kill a process of the container and its descendants. Return whether that was possible."""
    # Stop each process before its children are listed: otherwise it could fork another after that.
    pids = [pid]
    for parent in pids:  # and the children that the loop adds
        if not _signal(parent, signal.SIGSTOP, container_id):
            log.warning("process %s cannot be killed and still runs in container %s", pid, container_id)
            return False
        pids += _children(parent)
    killed = [_signal(each, signal.SIGKILL, container_id) for each in pids]
    return all(killed)


def signal_group(pid: int, number: signal.Signals, container_id: str) -> bool:
    """Send a signal to the process group of a command, as a terminal does. Return whether it was sent."""
    if not is_in(pid, container_id):
        return False
    with suppress(ProcessLookupError, PermissionError):
        # The engine starts each command as the leader of a session of its own.
        os.killpg(pid, number)
        return True
    return False


def is_in(pid: int, container_id: str) -> bool:
    """Whether this is a process of the container.

    Pids are reused, and if the agent has its own pid namespace, the pid may be another process there.
    """
    try:
        return container_id in (PROC / str(pid) / "cgroup").read_text()
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """The variables with which a process was started; none if it has ended."""
    try:
        content = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (each.partition(b"=") for each in content.split(b"\0") if each)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def _signal(pid: int, number: signal.Signals, container_id: str) -> bool:
    """Return whether the signal was sent, or the process has ended."""
    try:
        if container_id not in (PROC / str(pid) / "cgroup").read_text():
            return False
        os.kill(pid, number)
    except (ProcessLookupError, FileNotFoundError):
        return True
    except PermissionError:
        return False
    return True


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_text()
        return [int(child) for child in children.split()]
    return []
