"""Releases a GPU only when nothing of its last container is left on it (R11).

    container ended -> a later sample shows none of its processes, and as little memory in use as when idle
                       -> yes: the end is reported, which releases the GPU
                       -> not within 30 s: an incident in the same report quarantines the GPU

A MIG device is checked like a GPU. A share that ends beside others is checked for its own processes only:
memory that it left behind shows when the last share ends.

A value that the driver does not report never counts against a GPU; a missing sample does. A GPU with a fault
is not checked, because its inventory reports the fault.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from mooring.agent.decide.reconcile import key_of
from mooring.agent.gpus.reader import GpuReader, GpuReading
from mooring.agent.nvml.types import NvmlMigSample, NvmlProcess, NvmlSample
from mooring.agent.runtime import Container
from mooring.core.backoff import Backoff

RELEASE_WITHIN_S: Final = 30.0
_SAMPLE_WITHIN_S: Final = 2.0
_LEAST_TOLERANCE_MIB: Final = 64
_TOLERANCE: Final = 0.01  # of the GPU's memory
_MAX_NAMED: Final = 5  # processes in a message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU without MIG devices, or a MIG device."""

    uuid: str
    used_mib: int | None
    total_mib: int | None
    processes: Sequence[NvmlProcess]

    @property
    def unexplained_mib(self) -> int | None:
        """Memory in use that no listed process accounts for; None: unknown."""
        if self.used_mib is None:
            return None
        explained = sum(process["memory_used_mib"] or 0 for process in self.processes)
        return max(0, self.used_mib - explained)


class ReleaseGate:
    """Waits until the GPUs of an ended container are idle. Any thread may call.

    Args:
        container_of: returns the id of the container that a process runs in.
        within_s: how long a GPU may take to become idle.
    """

    def __init__(
        self, reader: GpuReader, container_of: Callable[[int], str | None], within_s: float = RELEASE_WITHIN_S
    ) -> None:
        self._reader, self._container_of, self._within_s = reader, container_of, within_s
        self._lock = threading.Lock()
        self._idle_mib: dict[str, int] = {}
        # Pids that were on a GPU before its present container started: a display server, for instance.
        self._prior_processes: dict[str, frozenset[int]] = {}

    def learn(self, reading: GpuReading, in_use: Collection[str]) -> None:
        """Record the least unexplained memory seen on each GPU without an instance."""
        for device in _devices(reading).values():
            used = device.unexplained_mib
            if used is not None and device.uuid not in in_use:
                with self._lock:
                    self._idle_mib[device.uuid] = min(used, self._idle_mib.get(device.uuid, used))

    def note_start(self, gpu_uuids: Collection[str]) -> None:
        """Record the processes on these GPUs, which no other instance uses, before a start."""
        devices = _devices(self._reader.latest()) if gpu_uuids else {}
        for uuid in devices.keys() & set(gpu_uuids):
            pids = frozenset(process["pid"] for process in devices[uuid].processes)
            with self._lock:
                self._prior_processes[uuid] = pids

    def wait(
        self, container: Container, gpu_uuids: Sequence[str], shared_gpus: Sequence[str] = ()
    ) -> dict[str, str]:
        """Wait until these GPUs of an ended container are idle.

        Args:
            shared_gpus: GPUs that other containers still use: only this container's processes must be gone.

        Returns:
            The reason for each GPU that is not idle in time, by UUID.
        """
        until = time.monotonic() + self._within_s
        backoff = Backoff(0.05, 1.0)
        while busy := self._busy(container, gpu_uuids, shared_gpus):
            if time.monotonic() >= until:
                break
            time.sleep(backoff.pause_s())
        with self._lock:
            for uuid in gpu_uuids:
                self._prior_processes.pop(uuid, None)
            for uuid in busy:
                self._idle_mib.pop(uuid, None)  # learned again after an admin has cleared the quarantine
        for uuid, why in busy.items():
            log.error("%s/%s has ended, but %s is not idle: %s", *key_of(container), uuid, why)
        return busy

    def _busy(
        self, container: Container, gpu_uuids: Sequence[str], shared_gpus: Sequence[str]
    ) -> dict[str, str]:
        """Why GPUs are not idle, by UUID. Those with a fault, or not in the inventory, count as idle."""
        uuids = [*gpu_uuids, *shared_gpus]
        if not uuids or not self._healthy(self._reader.latest(), uuids):
            return {}
        reading = self._reader.fresh(_SAMPLE_WITHIN_S)
        healthy = self._healthy(reading or self._reader.latest(), uuids)
        devices = _devices(reading) if reading else {}
        why = {
            uuid: self._why_busy(container, devices.get(uuid), alone=uuid not in shared_gpus)
            for uuid in healthy
        }
        return {uuid: message for uuid, message in why.items() if message}

    def _healthy(self, reading: GpuReading, gpu_uuids: Sequence[str]) -> list[str]:
        """Those of these GPUs and MIG devices without a fault; all if the inventory is unknown."""
        if reading.inventory is None:
            return list(gpu_uuids)
        gpus = [gpu for gpu in reading.inventory if gpu["fault"] is None]
        healthy = {gpu["uuid"] for gpu in gpus} | {mig["uuid"] for gpu in gpus for mig in gpu["mig_devices"]}
        return [uuid for uuid in gpu_uuids if uuid in healthy]

    def _why_busy(self, container: Container, device: _Device | None, *, alone: bool) -> str | None:
        if device is None:
            return "after its container ended, the driver does not report what is on it"
        left = self._processes_left(container, device, alone=alone)
        return left or (self._memory_left(device) if alone else None)

    def _processes_left(self, container: Container, device: _Device, *, alone: bool) -> str | None:
        """`alone`: no other container uses the device, so every process that came since the start counts."""
        with self._lock:
            prior = self._prior_processes.get(device.uuid) if alone else None
        left = [
            process
            for process in device.processes
            if self._container_of(process["pid"]) == container.container_id
            or (prior is not None and process["pid"] not in prior)
        ]
        if not left:
            return None
        named = [f"{process['pid']} ({process['name'] or 'unknown'})" for process in left[:_MAX_NAMED]]
        more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        return f"after its container ended, these processes are still on it: {', '.join(named)}{more}"

    def _memory_left(self, device: _Device) -> str | None:
        used = device.unexplained_mib
        with self._lock:
            idle = self._idle_mib.get(device.uuid)
        if used is None or idle is None:
            return None
        if used <= idle + max(_LEAST_TOLERANCE_MIB, _TOLERANCE * (device.total_mib or 0)):
            return None
        return f"after its container ended, {used} MiB of its memory are still in use (idle: {idle} MiB)"


def _devices(reading: GpuReading) -> dict[str, _Device]:
    """GPUs without MIG devices, and the MIG devices of the others, by UUID."""
    found = {}
    for sample in reading.samples:
        for each in sample["mig_devices"] or [sample]:
            found[each["uuid"]] = _device(each, sample["processes"] or ())
    return found


def _device(sample: NvmlSample | NvmlMigSample, processes: Sequence[NvmlProcess]) -> _Device:
    on_device = [process for process in processes if process["mig_uuid"] in {None, sample["uuid"]}]
    return _Device(sample["uuid"], sample["memory_used_mib"], sample["memory_total_mib"], on_device)
