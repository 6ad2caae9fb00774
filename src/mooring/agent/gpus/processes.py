"""Which container a process of the host runs in, as its control groups tell."""

import re
from pathlib import Path

PROC = Path("/proc")
KEPT = 4096

# /docker/<id>   …/docker-<id>.scope   …/cri-containerd-<id>.scope   …:cri-containerd:<id>   …/pod<uid>/<id>
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")


def container_in(cgroup: str) -> str | None:
    """The container's 64 hexadecimal digits in the text of a /proc/<pid>/cgroup, of version 1 or 2.

    The outermost one: a Docker inside a container is that container's own affair.
    """
    for line in cgroup.splitlines():
        found = _CONTAINER.search(line.split(":", 2)[-1])
        if found:
            return found[1]
    return None


class ProcessContainers:
    """Looks pids up and remembers the answer for as long as the process of that pid is the same one."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._known: dict[int, tuple[int, str | None]] = {}  # pid -> (start time, container)

    def container_of(self, pid: int) -> str | None:
        """The container of a process; None: it runs in none, or there is no such process."""
        started = self._started(pid)
        known = self._known.get(pid)
        if known and known[0] == started:
            return known[1]
        self._known.pop(pid, None)
        return None if started is None else self._look_up(pid, started)

    def _look_up(self, pid: int, started: int) -> str | None:
        container = container_in(_text(self._proc / str(pid) / "cgroup"))
        if self._started(pid) != started:  # another process took the pid over while we looked
            return None
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[pid] = (started, container)
        return container

    def _started(self, pid: int) -> int | None:
        """Clock ticks from boot to its start; the name before it may hold blanks and brackets."""
        fields = _text(self._proc / str(pid) / "stat").rpartition(")")[2].split()
        return int(fields[19]) if len(fields) > 19 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
