"""The order of pending units: priority, overdue, guarantee, backfill slot, fair share, age.

A project's share is the largest of its fractions of all GPUs, CPUs and memory, allocated now and recently,
divided by its weight. It grows with each placement, so the queue is reordered during a cycle. A unit with a
backfill slot keeps its position when another project's share shrinks: otherwise it would lose the slot.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from mooring.scheduler.cluster import Resources
from mooring.scheduler.model import ProjectView, Snapshot
from mooring.scheduler.packing.search import Key
from mooring.scheduler.queue_order import QueueOrder, Rank, Segment, Standing
from mooring.scheduler.units import EqualUnits, PendingUnits, Unit

_NO_PROJECT = ProjectView()


class ProjectShares:
    """What each project has, and its share, updated with each placement of the cycle."""

    def __init__(self, snapshot: Snapshot, held: Mapping[str, Resources], total: Resources) -> None:
        self._projects = snapshot.projects
        self._any_guarantee = any(project.guaranteed_gpu_milli for project in snapshot.projects.values())
        # The decayed usage of a constant allocation converges to the allocation times this constant.
        self._steady_usage_s = snapshot.policy.usage_half_life_s / math.log(2)
        self._total = total
        self._held = {project_id: replace(resources) for project_id, resources in held.items()}  # copies

    def project(self, project_id: str) -> ProjectView:
        return self._projects.get(project_id, _NO_PROJECT)

    def held(self, project_id: str) -> Resources:
        return self._held.setdefault(project_id, Resources())

    def dominant(self, project_id: str) -> float:
        """The project's largest share of a resource, used recently and allocated, divided by its weight."""
        project, held, total = self.project(project_id), self.held(project_id), self._total
        used = project.used
        parts = (
            self._part(used.gpu_s, held.gpu_milli / 1000, total.gpu_milli / 1000),
            self._part(used.cpu_s, held.cpu_milli / 1000, total.cpu_milli / 1000),
            self._part(used.memory_mib_s, held.memory_mib, total.memory_mib),
        )
        return max(parts) / max(project.weight, 1e-9)

    def _part(self, used_s: float, held: float, total: float) -> float:
        return (used_s / self._steady_usage_s + held) / total if total else 0.0

    def below_guarantee(self, unit: Unit) -> bool:
        """Whether the unit requests GPUs and its project has fewer than it is guaranteed."""
        guaranteed = self.project(unit.project_id).guaranteed_gpu_milli or 0
        return bool(unit.gpu_milli) and self.held(unit.project_id).gpu_milli < guaranteed

    def within_guarantee(self, unit: Unit) -> bool:
        """Whether the project's guarantee covers the unit's GPUs too. Only then may the unit reclaim GPUs."""
        guaranteed = self.project(unit.project_id).guaranteed_gpu_milli or 0
        return bool(unit.gpu_milli) and self.held(unit.project_id).gpu_milli + unit.gpu_milli <= guaranteed

    def beyond_guarantee(self, project_id: str, more_milli: int = 0) -> bool:
        """Whether the project has GPUs that another project may reclaim."""
        guaranteed = self.project(project_id).guaranteed_gpu_milli or 0
        return self._any_guarantee and self.held(project_id).gpu_milli + more_milli > guaranteed

    def take(self, project_id: str, gpu_milli: int, cpu_milli: int, memory_mib: int) -> None:
        held = self.held(project_id)
        held.gpu_milli += gpu_milli
        held.cpu_milli += cpu_milli
        held.memory_mib += memory_mib


@dataclass(slots=True)
class _Lane:
    """Equal units, the oldest first, all before or all after they became overdue, from `next` to `end`."""

    equal: EqualUnits
    next: int
    end: int
    skipped: set[int]  # places of units that have a lane of their own

    @property
    def head(self) -> Unit:
        return self.equal.units[self.next]

    def segment(self) -> Segment:
        """The ages and the units, from `next` on."""
        ages, units = self.equal.ages[self.next : self.end], self.equal.units[self.next : self.end]
        for place in sorted(self.skipped, reverse=True):
            if self.next <= place < self.end:
                del ages[place - self.next], units[place - self.next]
        return tuple(ages), tuple(units)

    def advance(self) -> bool:
        """Go to the next unit, and return whether there is one."""
        self.next += 1
        while self.next < self.end and self.next in self.skipped:
            self.next += 1
        return self.next < self.end


class SchedulingQueue:
    """The pending units in scheduling order, which changes with each placement.

    Args:
        alone: an instance whose unit is not dropped with its equals.
    """

    def __init__(
        self, snapshot: Snapshot, units: PendingUnits, shares: ProjectShares, alone: str | None = None
    ) -> None:
        self._snapshot = snapshot
        self._shares = shares
        self._units = units
        self._alone = frozenset() if alone is None else frozenset({alone})
        self._dropped: set[Key] = set()

    def __iter__(self) -> Iterator[Unit]:
        """Placements made between two units affect the order of those that follow."""
        lanes = list(self._lanes())
        heap = [(self.rank(lane.head), number) for number, lane in enumerate(lanes)]
        heapify(heap)
        while heap:
            rank, number = heappop(heap)
            lane = lanes[number]
            if lane.equal.key in self._dropped and lane.head.first.instance_id not in self._alone:
                continue
            if (current := self.rank(lane.head)) != rank:
                heappush(heap, (current, number))  # the share of the lane's project has grown
                continue
            yield lane.head
            if lane.advance():
                heappush(heap, (self.rank(lane.head), number))

    def drop(self, unit: Unit) -> None:
        """Leave out the units that are equal to this one from now on."""
        if (equal := self._units.equal_to(unit.first.instance_id)) is not None:
            self._dropped.add(equal.key)

    def order(self) -> QueueOrder:
        """All units by their present ranks. Later placements do not change the result."""
        segments: dict[Standing, list[Segment]] = {}
        for lane in self._lanes():
            segments.setdefault(self._standing(lane.head), []).append(lane.segment())
        return QueueOrder(tuple((each, tuple(sorted(segments[each]))) for each in sorted(segments)))

    def _lanes(self) -> Iterator[_Lane]:
        """Each overdue unit is before those that are not; a unit with a slot has a lane of its own."""
        apart: dict[Key, set[int]] = {}
        for instance_id in self._alone | self._snapshot.with_slots:
            if (equal := self._units.equal_to(instance_id)) is not None:
                apart.setdefault(equal.key, set()).add(equal.place_of(instance_id))
        for equal in self._units:
            places = apart.get(equal.key, set())
            overdue = bisect_left(equal.ages, 1, key=lambda age: 0 if self._overdue(age[0]) else 1)
            for first, end in ((0, overdue), (overdue, len(equal.units))):
                lane = _Lane(equal, first - 1, end, places)
                if lane.advance():
                    yield lane
            yield from (_Lane(equal, place, place + 1, set()) for place in places)

    def rank(self, unit: Unit) -> Rank:
        """The lowest rank is first."""
        return (*self._standing(unit), unit.age)

    def _standing(self, unit: Unit) -> Standing:
        overdue = self._overdue(unit.queued_at)
        return (
            -unit.priority,
            not overdue,
            not overdue and not self._shares.below_guarantee(unit),
            not overdue and not self._has_slot(unit),
            0.0 if overdue else self._shares.dominant(unit.project_id),
        )

    def _overdue(self, queued_at: float) -> bool:
        return self._snapshot.now - queued_at > self._snapshot.policy.overdue_after_s

    def _has_slot(self, unit: Unit) -> bool:
        return unit.first.instance_id in self._snapshot.with_slots
