"""Who comes first: by priority, by waiting for too long, by what is guaranteed, by promise, by share, by age.

A project's share is of what it is the largest part of: GPUs, CPUs or memory of the fleet (dominant resource).
What it used lately and what it holds count, by its weight. It grows with everything that is placed, so the
order of those behind is not known before. Whoever was promised a moment is not overtaken because another
project has less by now: with each change of who is first, what was kept for the one before would be lost.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Literal

from mooring.scheduler.cluster import Held
from mooring.scheduler.model import ProjectView, Snapshot
from mooring.scheduler.units import Unit

Because = Literal["priority", "overdue", "guarantee", "promised", "fair_share", "age"]
_BECAUSE: tuple[Because, ...] = ("priority", "overdue", "guarantee", "promised", "fair_share", "age")
Rank = tuple[int, int, int, int, float, tuple[float, str]]
_NO_PROJECT = ProjectView()


@dataclass(frozen=True, slots=True)
class Ahead:
    """One that comes before another, and the first rule by which it does."""

    instance_id: str
    because: Because


class Shares:
    """What projects have, counted on while a look places."""

    def __init__(self, snapshot: Snapshot, held: Mapping[str, Held], total: Held) -> None:
        self._projects = snapshot.projects
        self._guaranteed = any(project.guaranteed_gpu_milli for project in snapshot.projects.values())
        # One that has held the same for ever has used it for so long, halved for every half-life.
        self._lasting_s = snapshot.policy.usage_half_life_s / math.log(2)
        self._total = total
        self._held = {
            project_id: Held(of.gpu_milli, of.cpu_milli, of.memory_mib) for project_id, of in held.items()
        }

    def project(self, project_id: str) -> ProjectView:
        return self._projects.get(project_id, _NO_PROJECT)

    def held(self, project_id: str) -> Held:
        return self._held.setdefault(project_id, Held())

    def dominant(self, project_id: str) -> float:
        """The largest of the parts of the fleet that the project used lately and holds, by its weight."""
        project, held, total = self.project(project_id), self.held(project_id), self._total
        used = project.used
        parts = (
            self._part(used.gpu_s, held.gpu_milli / 1000, total.gpu_milli / 1000),
            self._part(used.cpu_s, held.cpu_milli / 1000, total.cpu_milli / 1000),
            self._part(used.memory_mib_s, held.memory_mib, total.memory_mib),
        )
        return max(parts) / max(project.weight, 1e-9)

    def _part(self, used_s: float, held: float, total: float) -> float:
        return (used_s / self._lasting_s + held) / total if total else 0.0

    def below_guarantee(self, unit: Unit) -> bool:
        """Whether it asks for GPUs and its project holds fewer than it is guaranteed."""
        guaranteed = self.project(unit.project_id).guaranteed_gpu_milli or 0
        return bool(unit.gpu_milli) and self.held(unit.project_id).gpu_milli < guaranteed

    def within_guarantee(self, unit: Unit) -> bool:
        """Whether its project would hold no more than it is guaranteed: only so much is taken back."""
        guaranteed = self.project(unit.project_id).guaranteed_gpu_milli or 0
        return bool(unit.gpu_milli) and self.held(unit.project_id).gpu_milli + unit.gpu_milli <= guaranteed

    def beyond_guarantee(self, project_id: str, more_milli: int = 0) -> bool:
        """Whether the project holds GPUs that some project may take back."""
        guaranteed = self.project(project_id).guaranteed_gpu_milli or 0
        return self._guaranteed and self.held(project_id).gpu_milli + more_milli > guaranteed

    def take(self, project_id: str, gpu_milli: int, cpu_milli: int, memory_mib: int) -> None:
        held = self.held(project_id)
        held.gpu_milli += gpu_milli
        held.cpu_milli += cpu_milli
        held.memory_mib += memory_mib


class SchedulingQueue:
    """The units in their order, which changes with what is placed."""

    def __init__(self, snapshot: Snapshot, units: Iterable[Unit], shares: Shares) -> None:
        self._snapshot = snapshot
        self._shares = shares
        self._units = units

    def __iter__(self) -> Iterator[Unit]:
        """What is placed between two units counts for those that follow."""
        by_priority = sorted(self._units, key=lambda unit: -unit.priority)
        for _priority, same in groupby(by_priority, key=lambda unit: unit.priority):
            units = sorted(same, key=_age)
            yield from (unit for unit in units if self._overdue(unit))
            yield from self._by_share([unit for unit in units if not self._overdue(unit)])

    def _by_share(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Oldest first of the project that has least. A guarantee is of GPUs, and puts nothing else ahead."""
        lanes: dict[tuple[str, bool, bool], deque[Unit]] = {}
        for unit in units:
            lane_of = unit.project_id, bool(unit.gpu_milli), self._promised(unit)
            lanes.setdefault(lane_of, deque()).append(unit)
        heap = [(self.rank(lane[0]), key) for key, lane in lanes.items()]
        heapify(heap)
        while heap:
            rank, key = heappop(heap)
            lane = lanes[key]
            if (now := self.rank(lane[0])) != rank:
                heappush(heap, (now, key))  # its project has more by now
                continue
            yield lane.popleft()
            if lane:
                heappush(heap, (self.rank(lane[0]), key))

    def rank(self, unit: Unit) -> Rank:
        """The lowest is first."""
        overdue = self._overdue(unit)
        return (
            -unit.priority,
            not overdue,
            not overdue and not self._shares.below_guarantee(unit),
            not overdue and not self._promised(unit),
            0.0 if overdue else self._shares.dominant(unit.project_id),
            _age(unit),
        )

    def _overdue(self, unit: Unit) -> bool:
        return self._snapshot.now - unit.queued_at > self._snapshot.policy.overdue_after_s

    def _promised(self, unit: Unit) -> bool:
        return unit.first.instance_id in self._snapshot.promised


def because(first: Rank, second: Rank) -> Because:
    """The rule by which the first is ahead of the second."""
    return next(name for name, a, b in zip(_BECAUSE, first, second, strict=True) if a != b)


def _age(unit: Unit) -> tuple[float, str]:
    return unit.queued_at, unit.first.instance_id
