"""When a card may be let go of: nothing of its last container is left on it (R11).

    container ended -> a sample made after that: no process of it, memory back to what it is when idle
                       -> yes: the end is reported, and with it the card is free
                       -> not within 30 s: an incident in the same report puts the card out of use

A MIG device is checked like a GPU. A share that ends beside others is checked for its own processes only:
memory that it left behind shows when the last share ends.

What a card does not tell is not held against it. What else is wrong with it, its inventory says.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from mooring.agent.decide.reconcile import key_of
from mooring.agent.gpus.reader import GpuReader, GpuReading
from mooring.agent.nvml.types import MigSample, Process, Sample
from mooring.agent.runtime import Container

RELEASE_WITHIN_S: Final = 30.0
_SAMPLE_WITHIN_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_LEAST_TOLERANCE_MIB: Final = 64
_TOLERANCE: Final = 0.01  # of the card's memory
_NAMED: Final = 5  # processes in a message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is given out as one thing: a card, or a MIG device on one."""

    uuid: str
    used_mib: int | None
    total_mib: int | None
    processes: Sequence[Process]

    @property
    def unexplained_mib(self) -> int | None:
        """Memory in use but for that of processes that are seen: it comes and goes with them."""
        if self.used_mib is None:
            return None
        explained = sum(process["memory_used_mib"] or 0 for process in self.processes)
        return max(0, self.used_mib - explained)


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
        self._prior_processes: dict[str, frozenset[int]] = {}

    def learn(self, reading: GpuReading, in_use: Collection[str]) -> None:
        """Note how little memory is used of the cards that nobody has: the least ever seen."""
        for place in _places(reading).values():
            used = place.unexplained_mib
            if used is not None and place.uuid not in in_use:
                with self._lock:
                    self._idle_mib[place.uuid] = min(used, self._idle_mib.get(place.uuid, used))

    def note_start(self, gpu_uuids: Collection[str]) -> None:
        """An attempt is about to be started on these cards, which nobody else has."""
        for place in _places(self._reader.latest()).values() if gpu_uuids else ():
            if place.uuid in gpu_uuids:
                seen = frozenset(process["pid"] for process in place.processes)
                with self._lock:
                    self._prior_processes[place.uuid] = seen

    def wait(
        self, container: Container, gpu_uuids: Sequence[str], shared_gpus: Sequence[str] = ()
    ) -> dict[str, str]:
        """Returns when these cards of an ended container are idle, or are not in time: then why, by card.

        Args:
            shared_gpus: cards that others go on with: only the container's own processes must be gone.
        """
        until, pause_s = time.monotonic() + self._within_s, _FIRST_PAUSE_S
        while busy := self._busy(container, gpu_uuids, shared_gpus):
            if time.monotonic() >= until:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        with self._lock:
            for uuid in gpu_uuids:
                self._prior_processes.pop(uuid, None)
            for uuid in busy:
                # Whoever clears it trusts it as it is then.
                self._idle_mib.pop(uuid, None)
        for uuid, why in busy.items():
            log.error("%s/%s has ended, and %s is not free: %s", *key_of(container), uuid, why)
        return busy

    def _busy(
        self, container: Container, gpu_uuids: Sequence[str], shared_gpus: Sequence[str]
    ) -> dict[str, str]:
        """Cards that are not the reader's, or at fault by themselves, are not waited for."""
        wanted = [*gpu_uuids, *shared_gpus]
        if not wanted or not self._may_know(self._reader.latest(), wanted):
            return {}
        reading = self._reader.fresh(_SAMPLE_WITHIN_S)
        asked = self._may_know(reading or self._reader.latest(), wanted)
        places = _places(reading) if reading else {}
        why = {
            uuid: self._why_busy(container, places.get(uuid), alone=uuid not in shared_gpus) for uuid in asked
        }
        return {uuid: message for uuid, message in why.items() if message}

    def _may_know(self, reading: GpuReading, gpu_uuids: Sequence[str]) -> list[str]:
        if reading.inventory is None:
            return list(gpu_uuids)
        cards = [gpu for gpu in reading.inventory if gpu["fault"] is None]
        well = {gpu["uuid"] for gpu in cards} | {mig["uuid"] for gpu in cards for mig in gpu["mig_devices"]}
        return [uuid for uuid in gpu_uuids if uuid in well]

    def _why_busy(self, container: Container, place: _Place | None, *, alone: bool) -> str | None:
        if place is None:
            return "after its container ended, the driver does not tell what is on it"
        left = self._processes_left(container, place, alone=alone)
        return left or (self._memory_left(place) if alone else None)

    def _processes_left(self, container: Container, place: _Place, *, alone: bool) -> str | None:
        with self._lock:
            prior = self._prior_processes.get(place.uuid) if alone else None
        left = [
            process
            for process in place.processes
            if self._container_of(process["pid"]) == container.container_id
            or (prior is not None and process["pid"] not in prior)
        ]
        if not left:
            return None
        named = [f"{process['pid']} ({process['name'] or 'unknown'})" for process in left[:_NAMED]]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return f"after its container ended, these processes are still on it: {', '.join(named)}{more}"

    def _memory_left(self, place: _Place) -> str | None:
        used = place.unexplained_mib
        with self._lock:
            idle = self._idle_mib.get(place.uuid)
        if used is None or idle is None:
            return None
        if used <= idle + max(_LEAST_TOLERANCE_MIB, _TOLERANCE * (place.total_mib or 0)):
            return None
        return (
            f"after its container ended, {used} MiB of its memory are still in use, and {idle} MiB when idle"
        )


def _places(reading: GpuReading) -> dict[str, _Place]:
    """A card that is cut up is no place of its own: what is on it is on its MIG devices."""
    found = {}
    for sample in reading.samples:
        for each in sample["mig_devices"] or [sample]:
            found[each["uuid"]] = _place(each, sample["processes"] or ())
    return found


def _place(told: Sample | MigSample, processes: Sequence[Process]) -> _Place:
    here = [one for one in processes if one["mig_uuid"] in {None, told["uuid"]}]
    return _Place(told["uuid"], told["memory_used_mib"], told["memory_total_mib"], here)
