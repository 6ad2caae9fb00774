"""The disk under the engine: how much there is, and whether the engine holds containers to a size.

Whether it does is tried, not guessed: overlay2 needs xfs mounted with pquota, and an engine that does not
know the option may ignore it. A container that never starts is created with a size that must be refused,
and with one that must be accepted.
"""

import io
import logging
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
PROBE_EVERY_S: Final = 600.0  # the filesystem may be mounted anew with other options
_REPOSITORY: Final = "mooring-probe"
_NOT_A_SIZE, _A_SIZE = "not-a-size", "1G"
_GIB_IN_MIB: Final = 1024
_MOST_RESERVED_MIB: Final = 200 * _GIB_IN_MIB

Info = Mapping[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskPolicy:
    """The operator's settings; null: derived from the size of the filesystem."""

    reserved_mib: int | None = None
    low_mib: int | None = None

    def allocatable_mib(self, total_mib: int) -> int:
        """What instances may have. The rest is for images, logs and the system."""
        reserved = min(total_mib // 5, _MOST_RESERVED_MIB) if self.reserved_mib is None else self.reserved_mib
        return max(0, total_mib - reserved)

    def low(self, total_mib: int) -> int:
        """With less than this available, the node is under disk pressure and pulls are broken off."""
        if self.low_mib is not None:
            return self.low_mib
        fraction = max(total_mib // 20, 2 * _GIB_IN_MIB)
        return min(fraction, 20 * _GIB_IN_MIB, total_mib // 10)


@dataclass(frozen=True, slots=True)
class Space:
    """A filesystem now, in MiB; `available` is what is left for programs that are not root's."""

    total_mib: int
    available_mib: int


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """What the trial said; `why_not` is the engine's own answer."""

    enforced: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DiskReport:
    """All that is known of the disk; `space` is None where the agent cannot see it."""

    root: str
    driver: str
    filesystem: str | None
    limits: DiskLimits
    space: Space | None
    images_mib: int
    low_mib: int


class EngineStorage:
    """The storage of one engine. Any thread may call."""

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
        self._tried: tuple[object, float, DiskLimits] | None = None
        self._root: str | None = None

    def facts(self, info: Info, images_mib: int) -> DiskFacts | None:
        """What is reported of the disk; None where the agent cannot see the engine's filesystem.

        Raises:
            RuntimeUnavailable: the engine went away during the trial.
        """
        report = self.report(info, images_mib)
        if (space := report.space) is None:
            return None
        # In coarse steps: every change is written down by the control plane.
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
        """Raises RuntimeUnavailable: the engine went away during the trial."""
        limits, space = self.limits(info), self.space()
        low_mib = self.policy.low(space.total_mib) if space else 0
        return DiskReport(self._root or "", *driver_of(info), limits, space, images_mib, low_mib)

    def space(self) -> Space | None:
        """Of the filesystem of the engine that was asked about last; None: it cannot be seen."""
        return self._measure(self._root) if self._root else None

    def limits(self, info: Info) -> DiskLimits:
        """Whether the engine enforces a container's size. Tried once, and again after a while.

        Raises:
            RuntimeUnavailable: the engine went away.
        """
        self._root = str(info.get("DockerRootDir") or "")
        key = (info.get("ID"), info.get("ServerVersion"), info.get("DockerRootDir"), driver_of(info))
        with self._lock:
            known = self._tried
            if known is None or known[0] != key or self._clock() - known[1] > PROBE_EVERY_S:
                known = self._tried = (key, self._clock(), self._try())
            return known[2]

    def forget(self) -> None:
        """The engine was away, and may come back with another configuration."""
        with self._lock:
            self._tried = None

    def _try(self) -> DiskLimits:
        image = f"{_REPOSITORY}:{secrets.token_hex(6)}"
        try:
            self.engine.import_image(_empty_archive(), image)
        except EngineRefused as refusal:
            return DiskLimits(enforced=False, why_not=f"it could not be tried: {refusal.message}")
        try:
            return self._try_with(image)
        finally:
            with suppress(EngineRefused):
                self.engine.remove_image(image)

    def _try_with(self, image: str) -> DiskLimits:
        if self._accepts(image, _NOT_A_SIZE) is None:
            return DiskLimits(enforced=False, why_not="the engine ignores the option")
        refused = self._accepts(image, _A_SIZE)
        return DiskLimits(enforced=refused is None, why_not=refused or "")

    def _accepts(self, image: str, size: str) -> str | None:
        """Why not; None if a container of this size can be created. Nothing is left of it."""
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
    """The storage driver and the filesystem that it stores on, as `docker info` tells."""
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
