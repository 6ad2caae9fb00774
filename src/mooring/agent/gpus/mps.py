"""The CUDA MPS control daemons of this node, which limit programs to their share of a GPU (decision 0012).

    <pipe directory>/control   SOCK_SEQPACKET, on which the daemon listens for programs
    <pipe directory>/shm       is /dev/shm for the daemon and for every container with a share under MPS

Both directories are mounted into containers, whose root may write to them. A bind mount has the options of
its source, so the source must be on a file system with `nosuid` and `nodev`. A file system without `noexec`,
or one that the host uses, such as that of `/tmp`, is accepted, but a warning is logged.

The agent does not speak the protocol between daemon and programs. It reads from the kernel whether the daemon
runs, as which user, in which pid namespace and with which /dev/shm.

With `{gpu}` in the pipe directory's path each GPU has its own daemon. A shared GPU belongs to one project at
a time, so no two projects then use the same daemon.
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
from mooring_client.schemas.spec import WHOLE_MILLI
from mooring_client.schemas.states import Reason

PIPE_DIRECTORY: Final = Path("/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's default; its owner is checked
GPU_PLACEHOLDER: Final = "{gpu}"
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where libraries look for it

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9-]+")
_CONTROL: Final = "control"
_SHM: Final = "shm"
_CONNECT_WITHIN_S: Final = 1.0
_PEER: Final = struct.Struct("3i")  # pid, uid, gid
_NOT_RUNNING: Final = frozenset({"T", "t", "Z", "X"})  # stopped, traced, zombie, dead
_WHOLE_PERCENT: Final = 100
# A container can write to the daemon's directories as the host's root.
_REQUIRED_OPTIONS: Final = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV}
_ADVISED_OPTIONS: Final = {"noexec": os.ST_NOEXEC}
# Their file systems should not be filled by containers.
_SYSTEM_DIRECTORIES: Final = tuple(map(Path, ("/", "/run", "/tmp", "/var", "/dev/shm")))  # noqa: S108

log = logging.getLogger(__name__)


class MpsUnavailableError(Exception):
    """MPS cannot enforce shares here; the message says why."""


class Mps:
    """The daemon of this node, or one for each GPU. Any thread may call.

    Args:
        gpus: returns the UUIDs of the GPUs that may be shared; needed if each has its own daemon.
    """

    def __init__(
        self, pipe_directory: Path = PIPE_DIRECTORY, gpus: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._pipe_directory, self._gpus = str(pipe_directory), gpus
        self._logged_problem: str | None = None
        self._logged_advice: str | None = None

    def of(self, gpu_uuid: str) -> "Daemon":
        """The daemon of this GPU. Raises MpsUnavailableError: the UUID is not a safe directory name."""
        if GPU_PLACEHOLDER in self._pipe_directory and not _SAFE_NAME.fullmatch(gpu_uuid):
            raise MpsUnavailableError(f"{gpu_uuid!r} cannot have an MPS daemon")
        return Daemon(Path(self._pipe_directory.replace(GPU_PLACEHOLDER, gpu_uuid)))

    def is_available(self) -> bool:
        """Whether MPS can be used on all GPUs. A new problem or new advice is logged."""
        try:
            self._check_all()
        except MpsUnavailableError as unavailable:
            problem = str(unavailable)
            if problem != self._logged_problem:
                log.info("MPS does not enforce shares of GPUs here: %s", problem)
            self._logged_problem = problem
            return False
        self._logged_problem = None
        if (advice := self.advice()) != self._logged_advice:
            self._logged_advice = advice
            if advice:
                log.warning("MPS: %s", advice)
        return True

    def advice(self) -> str | None:
        """What the operator should improve about the mounted directories; None: nothing."""
        advice = (self.of(gpu).advice() for gpu in self._gpu_of_each_daemon())
        return next(filter(None, advice), None)

    def require(self, gpu_uuids: Sequence[str], share: Share | None) -> None:
        """Raises StartDelayed if this is an MPS share without a usable daemon: it would not be limited."""
        if share is None or share.isolation != "mps":
            return
        try:
            for gpu_uuid in gpu_uuids:
                self.of(gpu_uuid).check()
        except MpsUnavailableError as error:
            raise StartDelayed(Reason(code="mps_unavailable", message=str(error))) from error

    def _check_all(self) -> None:
        if not (gpus := self._gpu_of_each_daemon()):
            raise MpsUnavailableError("no GPU is known yet")
        for gpu in gpus:
            self.of(gpu).check()

    def _gpu_of_each_daemon(self) -> Sequence[str]:
        """Without `{gpu}` in the path there is one daemon, whatever the UUID."""
        return self._gpus() if GPU_PLACEHOLDER in self._pipe_directory else ["any"]


@dataclass(frozen=True, slots=True)
class Daemon:
    pipe_directory: Path
    proc: Path = Path("/proc")

    def check(self) -> None:
        """Raises MpsUnavailableError unless a trustworthy daemon is running."""
        _require_own_directory(self.pipe_directory)
        _require_own_directory(self._shm)
        for each in (self.pipe_directory, self._shm):
            if missing := _missing_options(each, _REQUIRED_OPTIONS):
                raise MpsUnavailableError(
                    f"{each} is on a file system without {missing}; mount a tmpfs there (docs/operating.md)"
                )
        pid = self._peer()
        self._require_host_process(pid)
        self._require_running(pid)
        self._require_shared_memory(pid)

    def advice(self) -> str | None:
        """What the operator should improve about this daemon's directories; None: nothing."""
        for each in (self.pipe_directory, self._shm):
            if missing := _missing_options(each, _ADVISED_OPTIONS):
                return f"{each} should be on a file system with {missing}"
            if _device(each) in {_device(system) for system in _SYSTEM_DIRECTORIES}:
                return f"{each} should be on a tmpfs of its own: containers can fill its file system"
        return None

    def environment(self, share: Share) -> dict[str, str]:
        """The environment that limits a program to its share. The program sees its GPU as index 0."""
        percent = max(1, _WHOLE_PERCENT * share.milli // WHOLE_MILLI)
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.memory_mib}M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
        }

    def mounts(self) -> list[dict[str, Any]]:
        """Mounts for the Engine API: two fixed paths, none from a request (R6, R9)."""
        targets = {self.pipe_directory: self.pipe_directory, self._shm: SHARED_MEMORY}
        return [
            {
                "Type": "bind",
                "Source": str(source),
                "Target": str(target),
                "ReadOnly": False,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for source, target in targets.items()
        ]

    @property
    def _shm(self) -> Path:
        return self.pipe_directory / _SHM

    def _peer(self) -> int:
        """The pid of the process that listens at the socket, from the kernel."""
        control = self.pipe_directory / _CONTROL
        if control.is_symlink():
            raise MpsUnavailableError(f"{control} is a link")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(_CONNECT_WITHIN_S)
                connection.connect(str(control))
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        except OSError as error:
            raise MpsUnavailableError(f"no MPS daemon answers at {control}: {error}") from error
        pid, uid, _gid = _PEER.unpack(credentials)
        if uid not in {0, os.geteuid()}:
            raise MpsUnavailableError(
                f"the process that answers at {control} is of user {uid}, not of root or the agent's user"
            )
        if not pid:
            raise MpsUnavailableError(
                f"the process that answers at {control} is in another pid namespace than the agent"
            )
        return int(pid)

    def _require_host_process(self, pid: int) -> None:
        """Root in a container is user 0 too, and could replace the daemon's socket with its own."""
        try:
            theirs = (self.proc / str(pid) / "ns" / "pid").stat()
            ours = (self.proc / "self" / "ns" / "pid").stat()
        except OSError as error:
            raise MpsUnavailableError(
                f"the MPS daemon, process {pid}, cannot be inspected: {error}"
            ) from error
        if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
            raise MpsUnavailableError(
                f"the process that answers at {self.pipe_directory / _CONTROL}, {pid}, is in a container"
            )

    def _require_running(self, pid: int) -> None:
        try:
            state = (self.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError) as error:
            raise MpsUnavailableError(f"the MPS daemon, process {pid}, has ended") from error
        if state in _NOT_RUNNING:
            raise MpsUnavailableError(f"the MPS daemon, process {pid}, is stopped or dead (state {state})")

    def _require_shared_memory(self, pid: int) -> None:
        """With the host's /dev/shm, every program with a share could read and fill it."""
        path = self.proc / str(pid) / "root" / SHARED_MEMORY.relative_to("/")
        try:
            actual, required = path.stat(), self._shm.stat()
        except OSError as error:
            raise MpsUnavailableError(f"the MPS daemon's /dev/shm cannot be inspected: {error}") from error
        if (actual.st_dev, actual.st_ino) != (required.st_dev, required.st_ino):
            raise MpsUnavailableError(f"the MPS daemon's /dev/shm is not {self._shm}, as it must be")


def _missing_options(path: Path, options: Mapping[str, int]) -> str:
    """The mount options that a path's file system lacks."""
    try:
        flags = os.statvfs(path).f_flag
    except OSError as error:
        raise MpsUnavailableError(f"{path} cannot be inspected: {error}") from error
    return ",".join(name for name, flag in options.items() if not flags & flag)


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def _require_own_directory(path: Path) -> None:
    """Raises unless root or the agent's user owns the directory: any user can create one in /tmp."""
    try:
        found = path.lstat()
    except OSError as error:
        raise MpsUnavailableError(f"there is no {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise MpsUnavailableError(f"{path} is not a directory")
    if found.st_uid not in {0, os.geteuid()}:
        raise MpsUnavailableError(f"{path} is of user {found.st_uid}, not of root or the agent's user")
