"""When a card may be let go of: nothing of its last container is left on it (R11).

    container ended -> a sample made after that: no process of it, memory back to what it is when idle
                       -> yes: the end is reported, and with it the card is free
                       -> not within 30 s: an incident in the same report puts the card out of use

What a card does not tell is not held against it. What else is wrong with it, its inventory says.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from mooring.agent.gpu_types import Sample
from mooring.agent.gpus import GpuReader, GpuReading
from mooring.agent.reconcile import key_of
from mooring.agent.runtime import Container

RELEASE_WITHIN_S: Final = 30.0
_SAMPLE_WITHIN_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_LEAST_TOLERANCE_MIB: Final = 64
_TOLERANCE: Final = 0.01  # of the card's memory
_NAMED: Final = 5  # processes in a message

log = logging.getLogger(__name__)


class ReleaseGate:
    """Any thread may call.

    Args:
        container_of: the container that a process of this machine runs in.
        within_s: for so long a card has time to become idle.
    """

    def __init__(
        self,
        reader: GpuReader,
        container_of: Callable[[int], str | None],
        within_s: float = RELEASE_WITHIN_S,
    ) -> None:
        self._reader, self._container_of, self._within_s = reader, container_of, within_s
        self._lock = threading.Lock()
        self._idle_mib: dict[str, int] = {}
        # Who else was on a card when its present holder began, a display server for instance.
        self._bystanders: dict[str, frozenset[int]] = {}

    def learn(self, reading: GpuReading, in_use: Collection[str]) -> None:
        """Note how little memory is used of the cards that nobody has: the least ever seen."""
        for sample in reading.samples:
            used = _unexplained_mib(sample)
            if used is not None and sample["uuid"] not in in_use:
                with self._lock:
                    self._idle_mib[sample["uuid"]] = min(used, self._idle_mib.get(sample["uuid"], used))

    def begins(self, gpu_uuids: Collection[str]) -> None:
        """An attempt is about to be started on these cards."""
        for sample in self._reader.latest().samples if gpu_uuids else ():
            if sample["uuid"] in gpu_uuids:
                seen = frozenset(process["pid"] for process in sample["processes"] or ())
                with self._lock:
                    self._bystanders[sample["uuid"]] = seen

    def wait(self, container: Container, gpu_uuids: Sequence[str]) -> dict[str, str]:
        """Returns when these cards of an ended container are idle, or are not in time: then why, by card."""
        until, pause_s = time.monotonic() + self._within_s, _FIRST_PAUSE_S
        while busy := self._busy(container, gpu_uuids):
            if time.monotonic() >= until:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        with self._lock:
            for uuid in gpu_uuids:
                self._bystanders.pop(uuid, None)
            for uuid in busy:
                # Whoever clears it trusts it as it is then.
                self._idle_mib.pop(uuid, None)
        for uuid, why in busy.items():
            log.error("%s/%s has ended, and %s is not free: %s", *key_of(container), uuid, why)
        return busy

    def _busy(self, container: Container, gpu_uuids: Sequence[str]) -> dict[str, str]:
        """Cards that are not the reader's, or at fault by themselves, are not waited for."""
        if not gpu_uuids or not self._may_know(self._reader.latest(), gpu_uuids):
            return {}
        reading = self._reader.fresh(_SAMPLE_WITHIN_S)
        asked = self._may_know(reading or self._reader.latest(), gpu_uuids)
        samples = {sample["uuid"]: sample for sample in (reading.samples if reading else ())}
        why = {uuid: self._why_busy(container, samples.get(uuid)) for uuid in asked}
        return {uuid: message for uuid, message in why.items() if message}

    def _may_know(self, reading: GpuReading, gpu_uuids: Sequence[str]) -> list[str]:
        if reading.inventory is None:
            return list(gpu_uuids)
        well = {gpu["uuid"] for gpu in reading.inventory if gpu["fault"] is None}
        return [uuid for uuid in gpu_uuids if uuid in well]

    def _why_busy(self, container: Container, sample: Sample | None) -> str | None:
        if sample is None:
            return "after its container ended, the driver does not tell what is on it"
        return self._processes_left(container, sample) or self._memory_left(sample)

    def _processes_left(self, container: Container, sample: Sample) -> str | None:
        with self._lock:
            bystanders = self._bystanders.get(sample["uuid"])
        left = [
            process
            for process in sample["processes"] or ()
            if self._container_of(process["pid"]) == container.container_id
            or (bystanders is not None and process["pid"] not in bystanders)
        ]
        if not left:
            return None
        named = [f"{process['pid']} ({process['name'] or 'unknown'})" for process in left[:_NAMED]]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return f"after its container ended, these processes are still on it: {', '.join(named)}{more}"

    def _memory_left(self, sample: Sample) -> str | None:
        used, total = _unexplained_mib(sample), sample["memory_total_mib"]
        with self._lock:
            idle = self._idle_mib.get(sample["uuid"])
        if used is None or idle is None:
            return None
        if used <= idle + max(_LEAST_TOLERANCE_MIB, _TOLERANCE * (total or 0)):
            return None
        return (
            f"after its container ended, {used} MiB of its memory are still in use, and {idle} MiB when idle"
        )


def _unexplained_mib(sample: Sample) -> int | None:
    """Memory in use but for that of processes that are seen: it comes and goes with them."""
    if sample["memory_used_mib"] is None:
        return None
    explained = sum(process["memory_used_mib"] or 0 for process in sample["processes"] or ())
    return max(0, sample["memory_used_mib"] - explained)
