"""The disk of the engine: its size, and whether the engine limits the size of containers.

Limits are probed: overlay2 enforces them only on xfs mounted with pquota, and an engine that does not know
the option may ignore it. The probe creates containers of an invalid and of a valid size, and starts neither.
"""

import io
import secrets
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from mooring.agent.docker.client import Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.core.disk import DiskFacts

PROBE_LABEL: Final = "mooring.probe"
PROBE_EVERY_S: Final = 600.0  # the filesystem may be remounted with other options
_REPOSITORY: Final = "mooring-probe"
_INVALID_SIZE, _VALID_SIZE = "not-a-size", "1G"
_GIB_IN_MIB: Final = 1024
_MAX_RESERVED_MIB: Final = 200 * _GIB_IN_MIB

Info = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DiskPolicy:
    """The operator's settings. None: derived from the size of the filesystem."""

    reserved_mib: int | None = None
    low_mib: int | None = None

    def allocatable_mib(self, total_mib: int) -> int:
        """Return how many MiB instances may be allocated. The rest is for images, logs and the system."""
        reserved = min(total_mib // 5, _MAX_RESERVED_MIB) if self.reserved_mib is None else self.reserved_mib
        return max(0, total_mib - reserved)

    def low(self, total_mib: int) -> int:
        """Return the free MiB below which the node is under disk pressure and pulls are aborted."""
        if self.low_mib is not None:
            return self.low_mib
        return min(max(total_mib // 20, 2 * _GIB_IN_MIB), 20 * _GIB_IN_MIB, total_mib // 10)


@dataclass(frozen=True, slots=True)
class Space:
    """The current space of a filesystem; `available_mib` excludes the blocks reserved for root."""

    total_mib: int
    available_mib: int


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """The result of the probe; `why_not` says why limits are not enforced."""

    enforced: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DiskReport:
    """All facts of the disk; `space` is None if the agent cannot see the filesystem."""

    root: str
    driver: str
    filesystem: str | None
    limits: DiskLimits
    space: Space | None
    images_mib: int
    low_mib: int


class EngineStorage:
    """The storage of one engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        policy: DiskPolicy | None = None,
        measure: Callable[[str], Space | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.policy = engine, policy or DiskPolicy()
        self._measure, self._clock = measure or space_of, clock
        self._lock = threading.Lock()
        self._probed: tuple[object, float, DiskLimits] | None = None
        self._root: str | None = None

    def facts(self, info: Info, images_mib: int) -> DiskFacts | None:
        """Return what is reported to the control plane; None if the agent cannot see the filesystem.

        Raises:
            RuntimeUnavailable: the engine does not answer.
        """
        report = self.report(info, images_mib)
        if (space := report.space) is None:
            return None
        # Rounded down to coarse steps: the control plane stores every change.
        step = max(1, min(_GIB_IN_MIB, space.total_mib // 64))
        return DiskFacts(
            total_mib=space.total_mib,
            allocatable_mib=self.policy.allocatable_mib(space.total_mib),
            available_mib=space.available_mib // step * step,
            images_mib=images_mib,
            enforced=report.limits.enforced,
            driver=report.driver,
            filesystem=report.filesystem,
            pressure=space.available_mib < report.low_mib,
        )

    def report(self, info: Info, images_mib: int) -> DiskReport:
        """Return all facts. Raises RuntimeUnavailable: the engine does not answer."""
        limits = self.limits(info)  # also sets the directory for `space`
        space = self.space()
        low_mib = self.policy.low(space.total_mib) if space else 0
        driver, filesystem = driver_of(info)
        return DiskReport(self._root or "", driver, filesystem, limits, space, images_mib, low_mib)

    def space(self) -> Space | None:
        """Return the space of the engine's filesystem; None before `limits`, or if it cannot be seen."""
        return self._measure(self._root) if self._root else None

    def limits(self, info: Info) -> DiskLimits:
        """Return whether the engine limits the size of containers. It is probed again after `PROBE_EVERY_S`.

        Raises:
            RuntimeUnavailable: the engine does not answer.
        """
        self._root = str(info.get("DockerRootDir") or "")
        key = (info.get("ID"), info.get("ServerVersion"), info.get("DockerRootDir"), driver_of(info))
        with self._lock:
            probed = self._probed
            if probed is None or probed[0] != key or self._clock() - probed[1] > PROBE_EVERY_S:
                probed = self._probed = (key, self._clock(), self._probe())
            return probed[2]

    def forget(self) -> None:
        """Probe again: after an outage, the engine's configuration may have changed."""
        with self._lock:
            self._probed = None

    def _probe(self) -> DiskLimits:
        image = f"{_REPOSITORY}:{secrets.token_hex(6)}"
        try:
            self.engine.import_image(_empty_archive(), image)
        except EngineRefused as refusal:
            return DiskLimits(enforced=False, why_not=f"the probe failed: {refusal.message}")
        try:
            return self._probe_with(image)
        finally:
            with suppress(EngineRefused):
                self.engine.remove_image(image)

    def _probe_with(self, image: str) -> DiskLimits:
        if self._create_error(image, _INVALID_SIZE) is None:
            return DiskLimits(enforced=False, why_not="the engine ignores the option")
        error = self._create_error(image, _VALID_SIZE)
        return DiskLimits(enforced=error is None, why_not=error or "")

    def _create_error(self, image: str, size: str) -> str | None:
        """Create and remove a container of this size. Return the engine's error, if any."""
        config = {
            "Image": image,
            "Cmd": ["never-started"],
            "Labels": {PROBE_LABEL: "storage"},
            "HostConfig": {"StorageOpt": {"size": size}, "NetworkMode": "none"},
        }
        try:
            container = self.engine.create(config, f"{image.replace(':', '-')}-{size.lower()}")
        except EngineRefused as refusal:
            return refusal.message
        self.engine.remove(container, force=True)
        return None


def driver_of(info: Info) -> tuple[str, str | None]:
    """Return the storage driver and its filesystem, from `docker info`."""
    status = dict(entry for entry in info.get("DriverStatus") or [] if len(entry) == 2)
    driver = str(info.get("Driver") or "unknown")
    filesystem = status.get("Backing Filesystem") or status.get("Parent Filesystem")
    return driver, filesystem or (driver if driver in {"btrfs", "zfs"} else None)


def space_of(root: str) -> Space | None:
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return None
    return Space(usage.total // 2**20, usage.free // 2**20)


def _empty_archive() -> bytes:
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    return buffer.getvalue()
