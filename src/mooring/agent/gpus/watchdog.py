"""Keeps those who share a card to their own memory, and notices MIG devices that were taken away.

    one fresh sample a second, while there is a share -> how much each container has of its card -> strikes
        -> too much in two samples in a row: that container is killed, and never its neighbour
        -> what cannot be told, of a process or of the whole card, is no evidence: no strike

Where MPS runs, it refuses such allocations by itself, and this is for what gets around it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooring.agent.decide.reconcile import key_of
from mooring.agent.decide.snapshot import Key
from mooring.agent.gpus.reader import GpuReader, GpuReading
from mooring.agent.nvml.types import Sample
from mooring.agent.runtime import Container
from mooring.core.instance.state import Reason

# A neighbour whose memory is taken fails at its next allocation, so soon; NVML itself has news once a second.
CHECK_EVERY_S: Final = 1.0
# One sample may catch a program between two allocations, or a pid that has just become another's.
STRIKES: Final = 2
# What a program cannot help: the driver's part of a context differs by release and counts as the program's.
LEAST_TOLERANCE_MIB: Final = 64
TOLERANCE: Final = 0.02  # of what it may use
# The inventory is read every 15 s; one reading may miss a device that is there.
MISSING_IN: Final = 2
_SAMPLE_WITHIN_S: Final = 2.0

ContainerOf = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class Use:
    """What a container may use and has of the card that it shares, in MiB."""

    key: Key
    gpu_uuid: str
    may_use: int
    has: int | None  # null: not all of it can be told

    @property
    def is_too_much(self) -> bool:
        return self.has is not None and self.has > self.may_use + max(
            LEAST_TOLERANCE_MIB, TOLERANCE * self.may_use
        )


def uses(samples: Sequence[Sample], sharing: Iterable[Container], container_of: ContainerOf) -> list[Use]:
    """What each of these has of its card, from the processes that the driver lists there."""
    by_uuid = {sample["uuid"]: sample for sample in samples}
    found = []
    for container in sharing:
        if container.share is None:
            continue
        for uuid in container.gpu_uuids:
            has = _memory_of(container, by_uuid.get(uuid), container_of)
            found.append(Use(key_of(container), uuid, container.share.memory_mib, has))
    return found


def _memory_of(container: Container, sample: Sample | None, container_of: ContainerOf) -> int | None:
    if sample is None or sample["processes"] is None:
        return None
    known = 0
    for process in sample["processes"]:
        if container_of(process["pid"]) != container.container_id:
            continue
        if process["memory_used_mib"] is None:
            return None
        known += process["memory_used_mib"]
    return known


def judge(strikes: Mapping[Key, int], seen: Iterable[Use]) -> tuple[dict[Key, int], list[Use]]:
    """The strikes after these samples, and who has reached the end of them.

    A sample that tells nothing leaves the strikes as they are; one that shows a container within its share
    clears them.
    """
    after: dict[Key, int] = {}
    ended: list[Use] = []
    for use in seen:
        before = strikes.get(use.key, 0)
        count = before if use.has is None else before + 1 if use.is_too_much else 0
        if count >= STRIKES and use.is_too_much:
            ended.append(use)
        elif count:
            after[use.key] = count
    return after, ended


def overdrawn(use: Use) -> Reason:
    message = (
        f"Its processes had {use.has} MiB of {use.gpu_uuid}, and its share is {use.may_use} MiB; it was "
        "ended so that those who have the rest of the card can go on"
    )
    return Reason(code="gpu_memory_exceeded", message=message)


def missing(reading: GpuReading, holders: Iterable[Container]) -> list[tuple[Key, str]]:
    """MIG devices that somebody has and that a card, which is well, does not have any more."""
    if reading.error is not None or reading.inventory is None:
        return []
    cards = {gpu["uuid"]: gpu for gpu in reading.inventory if gpu["fault"] is None}
    found = []
    for container in holders:
        for uuid, card in zip(container.gpu_uuids, container.parent_gpus, strict=False):
            there = cards.get(card)
            if there is not None and uuid not in {device["uuid"] for device in there["mig_devices"]}:
                found.append((key_of(container), uuid))
    return found


def taken_away(uuid: str) -> Reason:
    message = f"{uuid} is not on its card any more: somebody on the node has changed how that is cut up"
    return Reason(code="mig_device_lost", message=message)


class Watchdog:
    """Remembers between two looks. To be used by one thread."""

    def __init__(self, reader: GpuReader, container_of: ContainerOf) -> None:
        self._reader, self._container_of = reader, container_of
        self._strikes: dict[Key, int] = {}
        self._missing: dict[tuple[Key, str], int] = {}
        self._inventory: object = None

    def check(self, containers: Sequence[Container]) -> list[tuple[Key, Reason]]:
        """Who of these may not go on, and why."""
        lost = [(key, taken_away(uuid)) for key, uuid in self._lost(containers)]
        return [*lost, *((use.key, overdrawn(use)) for use in self._overdrawn(containers))]

    def _overdrawn(self, containers: Sequence[Container]) -> list[Use]:
        sharing = [one for one in containers if one.share]
        reading = self._reader.fresh(_SAMPLE_WITHIN_S) if sharing else None
        samples = reading.samples if reading is not None and reading.error is None else ()
        self._strikes, ended = judge(self._strikes, uses(samples, sharing, self._container_of))
        return ended

    def _lost(self, containers: Sequence[Container]) -> list[tuple[Key, str]]:
        """Counted once for each reading of the inventory."""
        reading = self._reader.latest()
        if reading.inventory is self._inventory:
            return []
        self._inventory = reading.inventory
        self._missing = {one: self._missing.get(one, 0) + 1 for one in missing(reading, containers)}
        return [one for one, times in self._missing.items() if times >= MISSING_IN]
