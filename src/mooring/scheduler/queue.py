"""The order of pending units: priority, overdue, guarantee, backfill slot, fair share, age.

A project's share is the largest of its fractions of all GPUs, CPUs and memory, allocated now and recently,
divided by its weight. It grows with each placement, so the queue is reordered during a cycle. A unit with a
backfill slot keeps its position when another project's share shrinks: otherwise it would lose the slot.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Literal

from mooring.scheduler.cluster import Resources
from mooring.scheduler.model import ProjectView, Snapshot
from mooring.scheduler.units import Unit

# `promised`: the unit has a backfill slot.
Because = Literal["priority", "overdue", "guarantee", "promised", "fair_share", "age"]
_RULES: tuple[Because, ...] = ("priority", "overdue", "guarantee", "promised", "fair_share", "age")
Rank = tuple[int, int, int, int, float, tuple[float, str]]  # a value for each of the rules
_NO_PROJECT = ProjectView()


@dataclass(frozen=True, slots=True)
class Ahead:
    """An instance ahead of another in the queue, and the first rule that decides it."""

    instance_id: str
    because: Because


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


class SchedulingQueue:
    """The pending units in scheduling order, which changes with each placement."""

    def __init__(self, snapshot: Snapshot, units: Iterable[Unit], shares: ProjectShares) -> None:
        self._snapshot = snapshot
        self._shares = shares
        self._units = units

    def __iter__(self) -> Iterator[Unit]:
        """Placements made between two units affect the order of those that follow."""
        by_priority = sorted(self._units, key=lambda unit: -unit.priority)
        for _priority, same in groupby(by_priority, key=lambda unit: unit.priority):
            units = sorted(same, key=_age)
            yield from (unit for unit in units if self._overdue(unit))
            yield from self._by_share([unit for unit in units if not self._overdue(unit)])

    def _by_share(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Yield the unit with the lowest rank, again and again. Within a lane, ranks differ only by age."""
        lanes: dict[tuple[str, bool, bool], deque[Unit]] = {}
        for unit in units:
            lane_key = unit.project_id, bool(unit.gpu_milli), self._has_slot(unit)
            lanes.setdefault(lane_key, deque()).append(unit)
        heap = [(self.rank(lane[0]), key) for key, lane in lanes.items()]
        heapify(heap)
        while heap:
            rank, key = heappop(heap)
            lane = lanes[key]
            if (current := self.rank(lane[0])) != rank:
                heappush(heap, (current, key))  # the share of the lane's project has grown
                continue
            yield lane.popleft()
            if lane:
                heappush(heap, (self.rank(lane[0]), key))

    def rank(self, unit: Unit) -> Rank:
        """The lowest rank is first."""
        overdue = self._overdue(unit)
        return (
            -unit.priority,
            not overdue,
            not overdue and not self._shares.below_guarantee(unit),
            not overdue and not self._has_slot(unit),
            0.0 if overdue else self._shares.dominant(unit.project_id),
            _age(unit),
        )

    def _overdue(self, unit: Unit) -> bool:
        return self._snapshot.now - unit.queued_at > self._snapshot.policy.overdue_after_s

    def _has_slot(self, unit: Unit) -> bool:
        return unit.first.instance_id in self._snapshot.with_slots


def because(first: Rank, second: Rank) -> Because:
    """The rule that puts the first ahead of the second."""
    return next(name for name, a, b in zip(_RULES, first, second, strict=True) if a != b)


def _age(unit: Unit) -> tuple[float, str]:
    return unit.queued_at, unit.first.instance_id
