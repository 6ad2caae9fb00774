"""R5: compares the devices of a started container with those assigned to it.

First by the engine's description of the container, then by the device nodes in the container's /dev.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mooring.agent.docker.create import CDI_KIND, NO_DEVICES, RUNC, VISIBLE_DEVICES
from mooring_client.schemas.states import Reason

MinorOf = Callable[[str], int | None]  # UUID of a GPU -> its minor number, if known

_NVIDIA_MAJOR = 195
_FIRST_CONTROL_MINOR = 254  # nvidia-modeset, nvidiactl: no GPUs

log = logging.getLogger(__name__)


def mismatch(
    inspected: dict[str, Any], uuids: Sequence[str], *, simulated: bool, runtime: str = RUNC
) -> Reason | None:
    """Return why the container is not as requested, according to the engine; None if it is."""
    host = inspected["HostConfig"]
    wanted = set() if simulated else set(uuids)
    requested, counted = requested_devices(host)
    if counted or set(requested) != wanted:
        got = "GPUs that were not requested by UUID" if counted else _names(set(requested))
        return _reason(f"it got {got} instead of {_names(wanted)}")
    by_driver = any(request["Driver"] != "cdi" for request in host.get("DeviceRequests") or [])
    visible = _values(inspected["Config"]["Env"] or [], VISIBLE_DEVICES)
    if visible != [",".join(uuids) if by_driver else NO_DEVICES]:
        return _reason(f"{VISIBLE_DEVICES} is {visible}")
    if host["Runtime"] != runtime or host["Privileged"] or host.get("Devices"):
        return _reason("its runtime, privileges or devices are not the requested ones")
    return None


def foreign_devices(seen: set[int] | None, uuids: Iterable[str], minor_of: MinorOf) -> Reason | None:
    """Return why the GPUs in the container's /dev (`seen`; None: unknown) are not the assigned ones.

    Fewer than assigned is not a mismatch: root in the container can remove its device nodes, and must not be
    able to have a GPU quarantined that way.
    """
    if seen is None:
        return None
    minors = [minor_of(uuid) for uuid in uuids]
    has_more = len(seen) > len(minors) if None in minors else not seen.issubset(minors)
    if not has_more:
        return None
    return _reason(f"it sees the GPUs with minor numbers {sorted(seen)}, and was assigned {minors}")


def gpu_minors_in(
    container_id: str, pid: int, *, dev: Path = Path("/dev"), proc: Path = Path("/proc")
) -> set[int] | None:
    """Return the minor numbers of the NVIDIA GPUs in a container's /dev; None if they cannot be read.

    They cannot if the host has no GPU, the agent is not root, or the process has ended or is another's.
    """
    if not _gpu_minors(dev) or pid == 0:
        return None
    try:
        # If the agent has its own pid namespace, the pid may be another process there.
        if container_id not in (proc / str(pid) / "cgroup").read_text():
            log.warning("the agent does not see its containers' processes; their devices go unverified")
            return None
        return _gpu_minors(proc / str(pid) / "root" / "dev")
    except PermissionError:
        log.warning("the agent is not root; its containers' devices go unverified")
    except OSError:
        log.debug("process %s ended before its devices were read", pid)
    return None


def _gpu_minors(dev: Path) -> set[int]:
    # GPUs are recognized by device number: root in the container can rename device nodes.
    with os.scandir(dev) as entries:
        stats = [entry.stat(follow_symlinks=False) for entry in entries]
    numbers = {found.st_rdev for found in stats if stat.S_ISCHR(found.st_mode)}
    minors = {os.minor(number) for number in numbers if os.major(number) == _NVIDIA_MAJOR}
    return {minor for minor in minors if minor < _FIRST_CONTROL_MINOR}


def requested_devices(host: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the requested UUIDs, and whether any request is for a number of GPUs, or for all."""
    requests = host.get("DeviceRequests") or []
    ids = [name for request in requests for name in request.get("DeviceIDs") or []]
    counted = any(request.get("Count") or not request.get("DeviceIDs") for request in requests)
    return tuple(name.removeprefix(f"{CDI_KIND}=") for name in ids), counted


def _values(env: Iterable[str], name: str) -> list[str]:
    return [entry.split("=", 1)[1] for entry in env if entry.startswith(f"{name}=")]


def _names(uuids: set[str]) -> str:
    return ", ".join(sorted(uuids)) or "no GPU"


def _reason(detail: str) -> Reason:
    return Reason(code="gpu_mismatch", message=f"the container was removed because {detail}")
