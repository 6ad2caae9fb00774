"""Finds containers that exceed their share of a GPU's memory, and MIG devices that no longer exist.

    one fresh sample a second, while there is a share -> the GPU memory of each container -> strikes
        -> too much in two samples in a row: that container is killed, and never its neighbour
        -> unknown, of a process or of the whole GPU: such a sample is skipped

Where MPS runs, it rejects such allocations itself; this catches what bypasses it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooring.agent.decide.reconcile import key_of
from mooring.agent.decide.snapshot import Key
from mooring.agent.gpus.reader import GpuReader, GpuReading
from mooring.agent.nvml.types import NvmlSample
from mooring.agent.runtime import Container
from mooring_client.schemas.states import Reason

# Often, because a neighbour whose memory is taken fails at its next allocation; NVML updates once a second.
CHECK_EVERY_S: Final = 1.0
# One sample may catch a program between two allocations, or a pid that was just reused.
STRIKES: Final = 2
# The driver's part of a CUDA context counts as the program's memory, and differs by release.
LEAST_TOLERANCE_MIB: Final = 64
TOLERANCE: Final = 0.02  # of the allowed memory
# In a row: a single inventory reading may miss a device that exists.
MISSING_READINGS: Final = 2
_SAMPLE_WITHIN_S: Final = 2.0

ContainerOf = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class ShareUsage:
    """A container's memory on the GPU that it shares, in MiB."""

    key: Key
    gpu_uuid: str
    allowed: int
    used: int | None  # None: unknown

    @property
    def is_excessive(self) -> bool:
        return self.used is not None and self.used > self.allowed + max(
            LEAST_TOLERANCE_MIB, TOLERANCE * self.allowed
        )


def share_usages(
    samples: Sequence[NvmlSample], sharing: Iterable[Container], container_of: ContainerOf
) -> list[ShareUsage]:
    """The GPU memory of each of these containers, from the processes that the driver lists."""
    by_uuid = {sample["uuid"]: sample for sample in samples}
    found = []
    for container in sharing:
        if container.share is None:
            continue
        for uuid in container.gpu_uuids:
            used = _memory_of(container, by_uuid.get(uuid), container_of)
            found.append(ShareUsage(key_of(container), uuid, container.share.memory_mib, used))
    return found


def _memory_of(container: Container, sample: NvmlSample | None, container_of: ContainerOf) -> int | None:
    if sample is None or sample["processes"] is None:
        return None
    used = 0
    for process in sample["processes"]:
        if container_of(process["pid"]) != container.container_id:
            continue
        if process["memory_used_mib"] is None:
            return None
        used += process["memory_used_mib"]
    return used


def count_strikes(
    strikes: Mapping[Key, int], usages: Iterable[ShareUsage]
) -> tuple[dict[Key, int], list[ShareUsage]]:
    """The strikes after these samples, and the usages that reached the limit of strikes.

    Unknown usage leaves the strikes unchanged; usage within the share clears them.
    """
    after: dict[Key, int] = {}
    exceeded: list[ShareUsage] = []
    for usage in usages:
        before = strikes.get(usage.key, 0)
        if usage.is_excessive and before + 1 >= STRIKES:
            exceeded.append(usage)
        elif usage.is_excessive:
            after[usage.key] = before + 1
        elif usage.used is None and before:
            after[usage.key] = before
    return after, exceeded


def _memory_exceeded(usage: ShareUsage) -> Reason:
    message = (
        f"Its processes used {usage.used} MiB of {usage.gpu_uuid}, but its share is {usage.allowed} MiB; it "
        "was killed to protect the other instances on this GPU"
    )
    return Reason(code="gpu_memory_exceeded", message=message)


def missing_devices(reading: GpuReading, containers: Iterable[Container]) -> list[tuple[Key, str]]:
    """The container and UUID of each MIG device that its healthy GPU no longer lists."""
    if reading.error is not None or reading.inventory is None:
        return []
    gpus = {gpu["uuid"]: gpu for gpu in reading.inventory if gpu["fault"] is None}
    found = []
    for container in containers:
        for uuid, gpu_uuid in zip(container.gpu_uuids, container.parent_gpus, strict=False):
            gpu = gpus.get(gpu_uuid)
            if gpu is not None and uuid not in {device["uuid"] for device in gpu["mig_devices"]}:
                found.append((key_of(container), uuid))
    return found


def _device_lost(uuid: str) -> Reason:
    message = f"{uuid} no longer exists: the MIG devices of its GPU were changed on the node"
    return Reason(code="mig_device_lost", message=message)


class Watchdog:
    """Remembers strikes and missing devices from check to check. Used by one thread."""

    def __init__(self, reader: GpuReader, container_of: ContainerOf) -> None:
        self._reader, self._container_of = reader, container_of
        self._strikes: dict[Key, int] = {}
        self._missing: dict[tuple[Key, str], int] = {}
        self._inventory: object = None

    def check(self, containers: Sequence[Container]) -> list[tuple[Key, Reason]]:
        """The containers to kill, and why."""
        lost = [(key, _device_lost(uuid)) for key, uuid in self._lost(containers)]
        exceeded = [(usage.key, _memory_exceeded(usage)) for usage in self._exceeded(containers)]
        return [*lost, *exceeded]

    def _exceeded(self, containers: Sequence[Container]) -> list[ShareUsage]:
        sharing = [one for one in containers if one.share]
        reading = self._reader.fresh(_SAMPLE_WITHIN_S) if sharing else None
        samples = reading.samples if reading is not None and reading.error is None else ()
        self._strikes, exceeded = count_strikes(
            self._strikes, share_usages(samples, sharing, self._container_of)
        )
        return exceeded

    def _lost(self, containers: Sequence[Container]) -> list[tuple[Key, str]]:
        """Devices that were missing in several inventory readings in a row."""
        reading = self._reader.latest()
        if reading.inventory is self._inventory:
            return []
        self._inventory = reading.inventory
        missing = missing_devices(reading, containers)
        self._missing = {one: self._missing.get(one, 0) + 1 for one in missing}
        return [one for one, times in self._missing.items() if times >= MISSING_READINGS]
