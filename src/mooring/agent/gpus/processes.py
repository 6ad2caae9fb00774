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
    """The container's 64 hexadecimal digits in the text of a /proc/<pid>/cgroup, of version 1 or 2.

    The outermost one: with Docker in Docker, the container that this host's Docker started.
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
        """The container of a process; None: it runs in none, or does not exist."""
        started = self._started(pid)
        with self._lock:
            cached = self._cached.get(pid)
        if cached and cached[0] == started:
            return cached[1]
        return None if started is None else self._look_up(pid, started)

    def _look_up(self, pid: int, started: int) -> str | None:
        container = container_in(_text(self._proc / str(pid) / "cgroup"))
        if self._started(pid) != started:  # another process has the pid by now
            return None
        with self._lock:
            self._cached[pid] = (started, container)
        return container

    def _started(self, pid: int) -> int | None:
        """Clock ticks from boot to its start. The name before this field may contain spaces and brackets."""
        fields = _text(self._proc / str(pid) / "stat").rpartition(")")[2].split()
        return int(fields[19]) if len(fields) > 19 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
