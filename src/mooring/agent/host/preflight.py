"""Checks whether this machine can isolate untrusted containers (R1, R2, R8)."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from mooring.agent.disk.storage import DiskReport
from mooring.agent.docker.create import CDI_KIND, RUNC
from mooring.agent.docker.overlay import certificate_of, is_in_swarm, swarm_of
from mooring.agent.host import version_floors
from mooring.agent.host.firewall import METADATA
from mooring.agent.host.version_floors import CONTAINERD, DOCKER, TOOLKIT, Version, dotted
from mooring.agent.nvml.types import NodeFault, NvmlInventory
from mooring_client.schemas.states import Reason

TOOLKIT_CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
_UNSAFE_OPTION = "allow-cuda-compat-libs-from-container"
_LOW_DISK_MIB = 20 * 1024
_TRUSTED_ONLY = "allow it for trusted projects only"
_PROGRAM_TIMEOUT_S = 10

Info = Mapping[str, Any]
Preflight = Callable[[Info], Reason | None]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `mooring doctor`. `ok` is None for a warning."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""

    @classmethod
    def fine(cls, name: str, detail: str) -> Self:
        return cls(name, ok=True, detail=detail)

    @classmethod
    def warning(cls, name: str, detail: str, remedy: str) -> Self:
        return cls(name, ok=None, detail=detail, remedy=remedy)

    @classmethod
    def broken(cls, name: str, detail: str, remedy: str) -> Self:
        return cls(name, ok=False, detail=detail, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """The NVIDIA Container Toolkit on this machine."""

    version: Version | None  # None: not installed, or unknown
    unsafe_option: bool


def read_toolkit(config: Path = TOOLKIT_CONFIG, path: str | None = None) -> Toolkit:
    """Run `nvidia-ctk` from the PATH, and read the toolkit's configuration."""
    return Toolkit(_toolkit_version(path), _has_unsafe_option(config))


def toolkit_problem(toolkit: Toolkit, *, has_gpus: bool, allow_unsafe_toolkit: bool = False) -> Reason | None:
    """Return why no instance may be started on this node (R1), if it has GPUs and the toolkit is unsafe."""
    if not has_gpus or allow_unsafe_toolkit:
        return None
    floor = version_floors.floors()[TOOLKIT]
    if toolkit.version is None:
        message = f"nvidia-ctk was not found; install {TOOLKIT} {floor.wanted}"
        return Reason(code="toolkit_missing", message=message)
    if not floor.passes(toolkit.version):
        flaws = f"container escapes ({', '.join(floor.flaws)})"
        message = f"{TOOLKIT} {dotted(toolkit.version)} has known {flaws}; install {floor.wanted}"
        return Reason(code="toolkit_too_old", message=message)
    if toolkit.unsafe_option:
        message = f"{_UNSAFE_OPTION} in {TOOLKIT_CONFIG} allows container escapes; remove it"
        return Reason(code="toolkit_unsafe_option", message=message)
    return None


def runtime_problem(info: Info, runtime: str) -> Reason | None:
    """Return why no instance may be started on this node (R14), if the engine lacks the runtime."""
    if not (listed := info.get("Runtimes")) or runtime in listed:
        return None
    return Reason(
        code="runtime_missing",
        message=f"Docker has no runtime {runtime} (it has {', '.join(sorted(listed))}); add it under "
        '"runtimes" in /etc/docker/daemon.json, or change MOORING_RUNTIME',
    )


def versions_problem(info: Info, runtime: str) -> Reason | None:
    """Return why no instance may be started on this node (R1), if a version is vulnerable or unknown.

    Args:
        runtime: Docker's name of the runtime in use; the floor of runc applies to runc only.
    """
    versions = version_floors.engine_versions(info)
    for component in (RUNC, CONTAINERD, DOCKER):
        if component == RUNC and runtime != RUNC:
            continue
        floor = version_floors.floors()[component]
        stated = versions.get(component)
        version = version_floors.parse(stated or "")
        if version is None:
            return Reason(
                code="engine_version_unknown",
                message=f"Docker does not state the version of its {component}; install Docker "
                f"{version_floors.floors()[DOCKER].wanted}",
            )
        if not floor.passes(version):
            return Reason(
                code="engine_too_old",
                message=f"{component} {stated} has known container escapes ({', '.join(floor.flaws)}); "
                f"{component} must be {floor.wanted}: {floor.remedy}, or see MOORING_ALLOW_UNSAFE_VERSIONS",
            )
    return None


def socket_problem(info: Info, environment: Mapping[str, str]) -> Reason | None:
    """Return why no instance may be started on this node (R8), if Docker listens on TCP without TLS."""
    docker_host = environment.get("DOCKER_HOST", "")
    if docker_host.startswith(("tcp://", "http://")) and not environment.get("DOCKER_TLS_VERIFY"):
        exposed = docker_host
    else:
        warned = (str(warning) for warning in info.get("Warnings") or ())
        found = (re.search(r"API is accessible on (\S+) without", warning) for warning in warned)
        exposed = next((match[1] for match in found if match), "")
    if not exposed:
        return None
    return Reason(
        code="docker_exposed",
        message=f"Docker listens on {exposed} without TLS: anyone who reaches the port is root on the node; "
        "use its unix socket only",
    )


def isolation(is_active: Callable[[], bool], *, required: bool) -> Check:
    """Check that containers can be blocked from this machine, other projects and cloud metadata (R10).

    Args:
        is_active: returns whether the rules are set; raises, with the remedy, if they cannot be set.
    """
    name = "network isolation"
    try:
        active = is_active()
    except Exception as error:  # the operator must see any error
        if not required:
            detail = "none: containers can reach this machine and cloud metadata"
            return Check.warning(name, detail, f"do not admit untrusted projects; {error}")
        remedy = f"{error}. If all projects are trusted: MOORING_NETWORK_ISOLATION=best_effort"
        return Check.broken(name, "not possible: containers could reach this machine", remedy)
    rules = "the rules are active" if active else "possible; the agent sets the rules"
    return Check.fine(name, f"{rules}; blocked cloud metadata: {', '.join(METADATA)}")


def checks(
    info: Callable[[], Info],
    disk: Callable[[Info], DiskReport],
    toolkit: Toolkit,
    nvml: NvmlInventory | NodeFault | None,
    *,
    environment: Mapping[str, str] | None = None,
    allow_unsafe_toolkit: bool = False,
    allow_unsafe_versions: bool = False,
    runtime: str = RUNC,
) -> list[Check]:
    """Return all checks, in the order in which failures should be fixed.

    Args:
        info: queries the engine. If it raises, the error becomes a failed check, in place of the engine's.
        disk: measures the engine's disk, and probes whether it limits containers. May raise like `info`.
        nvml: the GPU reader's result; None if the machine has no NVIDIA driver.
    """
    uuids = [gpu["uuid"] for gpu in cast(NvmlInventory, nvml)["gpus"]] if nvml and "gpus" in nvml else []
    found = [_nvml(nvml), _toolkit(toolkit, has_gpus=bool(uuids), allow_unsafe=allow_unsafe_toolkit)]
    environment = os.environ if environment is None else environment
    try:
        answer = info()
        report = disk(answer)
    except Exception as error:  # the operator must see any error
        return [Check.broken("docker", str(error), "start Docker, or set DOCKER_HOST"), *found]
    engine = _versions(answer, runtime, allow_unsafe=allow_unsafe_versions)
    return [engine, *engine_checks(answer, uuids, environment, runtime), *disk_checks(report), *found]


def engine_checks(
    info: Info, uuids: list[str], environment: Mapping[str, str], runtime: str = RUNC
) -> list[Check]:
    """Return the checks of the engine's configuration."""
    return [
        _socket(info, environment),
        _runtime(info, runtime),
        _default_runtime(info),
        _live_restore(info),
        _swarm(info),
        _cgroups(info, has_gpus=bool(uuids)),
        _init(info),
        _cdi(info, uuids),
    ]


def _toolkit_version(path: str | None) -> Version | None:
    program = shutil.which("nvidia-ctk", path=path)
    if program is None:
        return None
    try:
        output = subprocess.run(  # noqa: S603 - a fixed name from the PATH, fixed arguments
            [program, "--version"], capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"version v?(\d+)\.(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _has_unsafe_option(config: Path) -> bool:
    try:
        content = tomllib.loads(config.read_text())
    except (OSError, UnicodeDecodeError):
        return False
    except tomllib.TOMLDecodeError:
        return True  # assume the worst
    features = content.get("features")
    return bool(isinstance(features, dict) and features.get(_UNSAFE_OPTION))


def _toolkit(toolkit: Toolkit, *, has_gpus: bool, allow_unsafe: bool) -> Check:
    name, detail = TOOLKIT, "not found"
    if toolkit.version is not None:
        detail = f"version {dotted(toolkit.version)}"
    reason = toolkit_problem(toolkit, has_gpus=has_gpus)
    if reason is None:
        return Check.fine(name, detail if has_gpus else f"{detail}; not needed without GPUs")
    if allow_unsafe:
        return Check.warning(name, f"{reason.message} (allowed here)", _TRUSTED_ONLY)
    return Check.broken(name, detail, reason.message)


def _nvml(nvml: NvmlInventory | NodeFault | None) -> Check:
    if nvml is None:
        return Check.fine("nvidia driver", "none; this node has CPUs only")
    if "gpus" not in nvml:
        return Check.broken("nvidia driver", nvml["message"], "make `nvidia-smi` work on the node")
    inventory = cast(NvmlInventory, nvml)
    if inventory["unreadable"]:
        detail = f"{len(inventory['unreadable'])} GPUs cannot be read"
        return Check.warning("nvidia driver", detail, "see `nvidia-smi` and the kernel's log")
    detail = f"version {inventory['driver_version']}, {len(inventory['gpus'])} GPUs"
    return Check.fine("nvidia driver", detail)


def _versions(info: Info, runtime: str, *, allow_unsafe: bool) -> Check:
    versions = version_floors.engine_versions(info)
    stated = ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) or "unknown"
    detail = f"{stated} (floors of {version_floors.reviewed()})"
    reason = versions_problem(info, runtime)
    if reason is None:
        return Check.fine("docker", detail)
    if allow_unsafe:
        return Check.warning("docker", f"{reason.message} (allowed here)", _TRUSTED_ONLY)
    return Check.broken("docker", detail, reason.message)


def _socket(info: Info, environment: Mapping[str, str]) -> Check:
    reason = socket_problem(info, environment)
    if reason is None:
        return Check.fine("docker socket", environment.get("DOCKER_HOST") or "the default unix socket")
    return Check.broken("docker socket", reason.message, "remove the tcp:// host from Docker's configuration")


def _runtime(info: Info, runtime: str) -> Check:
    reason = runtime_problem(info, runtime)
    if reason is None:
        return Check.fine("runtime", runtime)
    return Check.broken("runtime", f"Docker does not know {runtime}", reason.message)


def _default_runtime(info: Info) -> Check:
    runtime = info.get("DefaultRuntime", "")
    if runtime == "nvidia":
        return Check.warning(
            "default runtime",
            "nvidia: containers started outside Mooring may see every GPU",
            'remove "default-runtime" from /etc/docker/daemon.json',
        )
    return Check.fine("default runtime", runtime)


def _live_restore(info: Info) -> Check:
    if info.get("LiveRestoreEnabled"):
        return Check.fine("live-restore", "on")
    detail = "off: a restart of Docker stops every instance on this node"
    if is_in_swarm(info):  # Docker does not join a swarm with live-restore
        return Check.warning("live-restore", detail, "leave the swarm, unless groups need its networks")
    return Check.warning("live-restore", detail, 'set "live-restore": true in /etc/docker/daemon.json')


def _swarm(info: Info) -> Check:
    if not is_in_swarm(info):
        return Check.fine("swarm", "none: groups over several nodes have no private network")
    found = swarm_of(info)
    if found is not None:
        return Check.fine("swarm", f"{found.cluster_id}, {'manager' if found.manager else 'worker'}")
    remedy = f"let the agent read {certificate_of(info)}"
    return Check.warning("swarm", "not used: its id is unknown", remedy)


def _cgroups(info: Info, *, has_gpus: bool) -> Check:
    driver, version = info.get("CgroupDriver", "unknown"), info.get("CgroupVersion", "1")
    detail = f"version {version}, driver {driver}"
    if not has_gpus or driver != "systemd" or info.get("DiscoveredDevices"):
        return Check.fine("cgroups", detail)
    # https://github.com/NVIDIA/nvidia-container-toolkit/issues/48
    detail += ": `systemctl daemon-reload` revokes the GPUs of running containers"
    return Check.warning("cgroups", detail, "enable CDI in Docker, or set native.cgroupdriver=cgroupfs")


def _init(info: Info) -> Check:
    if (info.get("InitCommit") or {}).get("ID") == "N/A":
        detail = "docker-init was not found: programs that ignore SIGTERM use their whole grace period"
        return Check.warning("docker-init", detail, "install tini (Debian), or Docker's own packages")
    return Check.fine("docker-init", str(info.get("InitBinary", "docker-init")))


def disk_checks(report: DiskReport) -> list[Check]:
    """Check whether the disk use of instances can be limited, and how full the disk is."""
    driver = f"{report.driver} on {report.filesystem or 'unknown'}"
    if report.limits.enforced:
        storage = Check.fine("storage", f"{driver}: disk_mib is enforced")
    else:
        detail = f"{driver}: instances' disk use cannot be limited ({report.limits.why_not})"
        remedy = "put Docker's data on xfs mounted with pquota (or btrfs), or admit trusted projects only"
        storage = Check.warning("storage", detail, remedy)
    return [storage, _disk(report)]


def _disk(report: DiskReport) -> Check:
    root, space = report.root, report.space
    if space is None:
        remedy = "run the agent on the host, or mount that folder read-only into the agent's container"
        return Check.warning("disk", f"the agent cannot see {root}", remedy)
    free, total, images = (mib // 1024 for mib in (space.available_mib, space.total_mib, report.images_mib))
    detail = f"{free} of {total} GiB free in {root}, {images} GiB of images"
    remedy = "remove images (`docker image prune -a`), or give Docker a larger disk"
    if space.available_mib < report.low_mib:
        return Check.broken("disk", f"{detail}: disk pressure, nothing is placed or pulled here", remedy)
    if space.available_mib < _LOW_DISK_MIB:
        return Check.warning("disk", f"{detail}: too little for CUDA images", remedy)
    return Check.fine("disk", detail)


def _cdi(info: Info, uuids: list[str]) -> Check:
    if not uuids:
        return Check.fine("cdi", "no GPUs to list")
    listed = {device.get("ID") for device in info.get("DiscoveredDevices") or []}
    missing = [uuid for uuid in uuids if f"{CDI_KIND}={uuid}" not in listed]
    if not missing:
        return Check.fine("cdi", f"lists all {len(uuids)} GPUs")
    if missing != uuids:
        remedy = "run `nvidia-ctk cdi generate` again"
        return Check.warning("cdi", f"does not list {', '.join(missing)}", remedy)
    return Check.fine("cdi", "not used; Docker's nvidia driver adds GPUs to containers")
