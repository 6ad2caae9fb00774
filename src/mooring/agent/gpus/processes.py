"""Finds the container of a host process by its control groups."""

import re
from pathlib import Path
from threading import Lock

from cachetools import LRUCache

PROC = Path("/proc")
MAX_CACHED = 4096

# /docker/<id>   …/docker-<id>.scope   …/cri-containerd-<id>.scope   …:cri-containerd:<id>   …/pod<uid>/<id>
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")


def container_in(cgroup: str) -> str | None:
    """The container id that the text of a /proc/<pid>/cgroup names, for control groups of version 1 or 2.

    With Docker in Docker the text names several: the first is the container that this host's Docker started.
    """
    for line in cgroup.splitlines():
        found = _CONTAINER.search(line.split(":", 2)[-1])
        if found:
            return found[1]
    return None


class ProcessContainers:
    """Caches the container of each pid for as long as the pid belongs to the same process. Thread-safe."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._lock = Lock()
        self._cached: LRUCache[int, tuple[int, str | None]] = LRUCache(MAX_CACHED)  # start time, container

    def container_of(self, pid: int) -> str | None:
        """The container of a process; None: the process is in no container, or does not exist."""
        started_at = self._start_time(pid)
        if started_at is None:
            return None
        with self._lock:
            cached_start, container = self._cached.get(pid, (None, None))
        return container if cached_start == started_at else self._look_up(pid, started_at)

    def _look_up(self, pid: int, started_at: int) -> str | None:
        container = container_in(_text(self._proc / str(pid) / "cgroup"))
        if self._start_time(pid) != started_at:  # the process has ended, and another may have its pid
            return None
        with self._lock:
            self._cached[pid] = (started_at, container)
        return container

    def _start_time(self, pid: int) -> int | None:
        """When the process started, in clock ticks since boot; None: it does not exist."""
        # Field 22. Field 2 is the command's name in parentheses, and may contain spaces and parentheses.
        from_field_3 = _text(self._proc / str(pid) / "stat").rpartition(")")[2].split()
        return int(from_field_3[19]) if len(from_field_3) > 19 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
