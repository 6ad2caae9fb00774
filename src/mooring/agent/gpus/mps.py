"""The CUDA MPS control daemons of this node, which hold programs to their shares of a card (decision 0012).

    <pipe directory>/control   SOCK_SEQPACKET, the daemon listens; programs find the daemon here
    <pipe directory>/shm       is the daemon's own /dev/shm, and that of every container that shares a card

Both are mounted into containers, whose root may write to them. Docker cannot give a bind mount other options
than its source has, so the source must be on a file system without set-user-ID programs and devices; without
`noexec`, or without a size of its own, it is used and the log says so.

What the daemon and its programs say to each other is NVIDIA's own affair. That it is alive, who it is and
which /dev/shm it has, the kernel tells.

With `{gpu}` in its path each card has a daemon of its own. Since a shared card has one project, no two
projects then meet at a daemon.
"""

import logging
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooring.agent.decide.device_claims import Share
from mooring.agent.runtime import StartDelayed
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.instance.state import Reason

PIPE_DIRECTORY: Final = Path("/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's default; whose it is, is looked at
CARD_HERE: Final = "{gpu}"
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where libraries look for it

_FOLDER: Final = re.compile(r"[A-Za-z0-9-]+")
_CONTROL: Final = "control"
_SHM: Final = "shm"
_ANSWER_WITHIN_S: Final = 1.0
_PEER: Final = struct.Struct("3i")  # pid, uid, gid
_NOT_AT_WORK: Final = frozenset({"T", "t", "Z", "X"})  # stopped, traced, dead
_WHOLE_PERCENT: Final = 100
# What a container writes there is on the host, and belongs to its root.
_REQUIRED_OPTIONS: Final = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV}
_ADVISED_OPTIONS: Final = {"noexec": os.ST_NOEXEC}
# Not to be filled by a container.
_SYSTEM_DIRECTORIES: Final = tuple(map(Path, ("/", "/run", "/tmp", "/var", "/dev/shm")))  # noqa: S108

log = logging.getLogger(__name__)


class MpsUnavailableError(Exception):
    """No share can be held to its limits here; the message says why."""


class Mps:
    """The daemons of this node, or the one. Any thread may call.

    Args:
        cards: the UUIDs of those that must have a daemon each, where each has one.
    """

    def __init__(
        self, pipe_directory: Path = PIPE_DIRECTORY, cards: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._pipe_directory, self._cards = str(pipe_directory), cards
        self._why_not: str | None = None  # as it was last logged
        self._advice: str | None = None  # likewise

    def of(self, card: str) -> "Daemon":
        """Raises MpsUnavailableError: the card's name makes no folder's."""
        if CARD_HERE in self._pipe_directory and not _FOLDER.fullmatch(card):
            raise MpsUnavailableError(f"no MPS daemon can be of {card!r}")
        return Daemon(Path(self._pipe_directory.replace(CARD_HERE, card)))

    def answers(self) -> bool:
        """Says in the log, once, why it is not used: somebody may have started it for us."""
        try:
            self._check_all()
        except MpsUnavailableError as why:
            if str(why) != self._why_not:
                log.info("shares of GPUs are not held by MPS here: %s", why)
            self._why_not = str(why)
            return False
        self._why_not = None
        if (advice := self.advice()) != self._advice:
            self._advice = advice
            if advice:
                log.warning("MPS: %s", advice)
        return True

    def advice(self) -> str | None:
        """What should be better about the directories that shares of GPUs get."""
        advice = (self.of(card).advice() for card in self._cards_with_daemons())
        return next(filter(None, advice), None)

    def require(self, gpu_uuids: Sequence[str], share: Share | None) -> None:
        """Raises StartDelayed: without its daemon, what has this share would run without its limits."""
        if share is None or share.isolation != "mps":
            return
        try:
            for card in gpu_uuids:
                self.of(card).check()
        except MpsUnavailableError as why:
            raise StartDelayed(Reason(code="mps_unavailable", message=str(why))) from why

    def _check_all(self) -> None:
        if not (cards := self._cards_with_daemons()):
            raise MpsUnavailableError("no GPU is known yet")
        for card in cards:
            self.of(card).check()

    def _cards_with_daemons(self) -> Sequence[str]:
        return self._cards() if CARD_HERE in self._pipe_directory else ["any"]


@dataclass(frozen=True, slots=True)
class Daemon:
    pipe_directory: Path
    proc: Path = Path("/proc")

    def check(self) -> None:
        """Raises MpsUnavailableError unless a daemon that may be trusted is at work."""
        _require_own_directory(self.pipe_directory)
        _require_own_directory(self._shm)
        for each in (self.pipe_directory, self._shm):
            if missing := _missing(each, _REQUIRED_OPTIONS):
                raise MpsUnavailableError(
                    f"{each} is on a file system without {missing}; mount a tmpfs there (docs/operating.md)"
                )
        pid = self._peer()
        self._require_of_the_host(pid)
        self._require_at_work(pid)
        self._require_shared_memory(pid)

    def advice(self) -> str | None:
        """What programs in containers can do to the host through these directories, as they are mounted."""
        for each in (self.pipe_directory, self._shm):
            if missing := _missing(each, _ADVISED_OPTIONS):
                return f"{each} should be on a file system with {missing}"
            if _device(each) in {_device(system) for system in _SYSTEM_DIRECTORIES}:
                return f"{each} should be on a tmpfs of its own: containers can fill the one that it is on"
        return None

    def environment(self, share: Share) -> dict[str, str]:
        """For a program that may use no more than its share. It sees one card, which is therefore its 0."""
        percent = max(1, _WHOLE_PERCENT * share.milli // WHOLE_MILLI)
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.memory_mib}M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
        }

    def mounts(self) -> list[dict[str, Any]]:
        """In the words of the Engine API: two fixed paths, and none that anybody asked for (R6, R9)."""
        ways = {self.pipe_directory: self.pipe_directory, self._shm: SHARED_MEMORY}
        return [
            {
                "Type": "bind",
                "Source": str(source),
                "Target": str(target),
                "ReadOnly": False,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for source, target in ways.items()
        ]

    @property
    def _shm(self) -> Path:
        return self.pipe_directory / _SHM

    def _peer(self) -> int:
        """The process that listens; the kernel itself says which one it is."""
        control = self.pipe_directory / _CONTROL
        if control.is_symlink():
            raise MpsUnavailableError(f"{control} is a link")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as call:
                call.settimeout(_ANSWER_WITHIN_S)
                call.connect(str(control))
                told = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        except OSError as error:
            raise MpsUnavailableError(f"no MPS daemon answers at {control}: {error}") from error
        pid, uid, _gid = _PEER.unpack(told)
        if uid not in {0, os.geteuid()}:
            raise MpsUnavailableError(f"what answers at {control} is of user {uid}, not of root")
        if not pid:
            raise MpsUnavailableError(f"what answers at {control} is in another pid namespace than the agent")
        return int(pid)

    def _require_of_the_host(self, pid: int) -> None:
        """Root in a container may put a socket of its own in place of the daemon's, and is user 0 as well."""
        try:
            theirs = (self.proc / str(pid) / "ns" / "pid").stat()
            ours = (self.proc / "self" / "ns" / "pid").stat()
        except OSError as error:
            raise MpsUnavailableError(
                f"the MPS daemon, process {pid}, cannot be looked at: {error}"
            ) from error
        if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
            raise MpsUnavailableError(
                f"what answers at {self.pipe_directory / _CONTROL} is process {pid} of a container"
            )

    def _require_at_work(self, pid: int) -> None:
        try:
            state = (self.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError) as error:
            raise MpsUnavailableError(f"the MPS daemon, process {pid}, has ended") from error
        if state in _NOT_AT_WORK:
            raise MpsUnavailableError(f"the MPS daemon, process {pid}, is stopped or dead (state {state})")

    def _require_shared_memory(self, pid: int) -> None:
        """With the host's own, every program with a share could read and fill the host's shared memory."""
        theirs = self.proc / str(pid) / "root" / SHARED_MEMORY.relative_to("/")
        try:
            its, ours = theirs.stat(), self._shm.stat()
        except OSError as error:
            raise MpsUnavailableError(f"the MPS daemon's /dev/shm cannot be seen: {error}") from error
        if (its.st_dev, its.st_ino) != (ours.st_dev, ours.st_ino):
            raise MpsUnavailableError(f"the MPS daemon's /dev/shm is not {self._shm}; start it with that one")


def _missing(path: Path, options: Mapping[str, int]) -> str:
    """Those of the mount options that a path's file system does not have."""
    try:
        flags = os.statvfs(path).f_flag
    except OSError as error:
        raise MpsUnavailableError(f"{path} cannot be looked at: {error}") from error
    return ",".join(name for name, flag in options.items() if not flags & flag)


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def _require_own_directory(path: Path) -> None:
    """Anybody may make a directory in /tmp; what is in it would come into containers."""
    try:
        found = path.lstat()
    except OSError as error:
        raise MpsUnavailableError(f"there is no {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise MpsUnavailableError(f"{path} is not a directory")
    if found.st_uid not in {0, os.geteuid()}:
        raise MpsUnavailableError(f"{path} is of user {found.st_uid}, not of root")
