"""A scheduling cycle: places requests in the order of the queue, and defers those that do not fit."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mooring.scheduler.backfill.deferral import DeferralPlanner
from mooring.scheduler.backfill.planner import BackfillPlanner
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.unplaced import Explanations
from mooring.scheduler.feasibility import quotas
from mooring.scheduler.gangs import gangs
from mooring.scheduler.model import Placement, Quota, Snapshot
from mooring.scheduler.packing.search import Found, Key
from mooring.scheduler.plan import SchedulingPlan, Waiting
from mooring.scheduler.queue import ProjectShares, SchedulingQueue
from mooring.scheduler.units import EqualUnits, Unit


def schedule(snapshot: Snapshot, cache: CycleCache | None = None) -> SchedulingPlan:
    """Place the requests that fit, in the order of the queue, and explain and forecast the others.

    Args:
        cache: state of earlier cycles; only one cycle may use it at a time.
    """
    return SchedulingCycle(snapshot, cache or CycleCache()).plan()


def plan_for(snapshot: Snapshot, instance_id: str, cache: CycleCache) -> SchedulingPlan:
    """The plan for one request and those ahead of it. Only this request and its gang are explained."""
    return SchedulingCycle(snapshot, cache).plan_for(instance_id)


class SchedulingCycle:
    """Placements change the cluster state in the cache. The snapshot of the next cycle overwrites it."""

    def __init__(self, snapshot: Snapshot, cache: CycleCache) -> None:
        cache.update(snapshot.nodes)
        cluster = cache.cluster
        cluster.set_potential(snapshot.potential)
        self.snapshot = snapshot
        self._at = snapshot.at
        self._node_groups = cache.node_groups
        self.cluster = cluster
        self._quotas: dict[str, Quota] = dict(snapshot.quotas)
        cache.units.update(snapshot.requests)
        self._units = cache.units
        self._shares = ProjectShares(snapshot, cluster.held, cluster.total)
        self._order = SchedulingQueue(snapshot, self._units, self._shares).order()
        self.backfill = BackfillPlanner(cluster, self._at)
        self._deferral = DeferralPlanner(snapshot, cache.start_times, cluster, self._shares, self.backfill)
        self.placements: list[Placement] = []
        self.decided: list[Unit] = []  # in the order of the queue
        self._failed: set[Key] = set()

    def decisions(self) -> SchedulingPlan:
        """The plan without explanations, which take longer than the decisions."""
        for _ in self.steps():
            pass
        return self._plan(())

    def plan(self) -> SchedulingPlan:
        for _ in self.steps():
            pass
        return self._plan(self._explained(self._units))

    def steps(self) -> Iterator[Unit]:
        """Decide one unit at a time, as the caller iterates.

        Units that cannot be placed, because an equal one could not, are left out.
        """
        queue = SchedulingQueue(self.snapshot, self._units, self._shares)
        for unit in queue:
            self._decide(queue, unit)
            yield unit

    def plan_for(self, instance_id: str) -> SchedulingPlan:
        queue = SchedulingQueue(self.snapshot, self._units, self._shares, instance_id)
        for unit in queue:
            self._decide(queue, unit)
            if _has(unit, instance_id):
                break
        equal = self._units.equal_to(instance_id)
        return self._plan(self._explained([equal] if equal else []))

    def before(self, instance_id: str) -> Unit | None:
        """Decide the units ahead of an instance, and return its unit; None if it is not pending."""
        queue = SchedulingQueue(self.snapshot, self._units, self._shares, instance_id)
        for unit in queue:
            if _has(unit, instance_id):
                return unit.with_quota(self._quotas)
            self._decide(queue, unit)
        return None

    def _explained(self, units: Iterable[EqualUnits]) -> Iterator[Waiting]:
        """Why the units that are not placed wait."""
        placed = {each.instance_id for each in self.placements}
        explanations = Explanations(self.cluster, self._node_groups, self._at)
        for equal in sorted(units, key=lambda equal: equal.ages[0]):
            queued = equal.queued
            if placed and not placed.isdisjoint(equal.ids):
                queued = tuple(each for each in queued if each[1] not in placed)
            if queued:
                yield Waiting(queued, explanations.of(equal.units[-1].with_quota(self._quotas)))

    def _plan(self, waiting: Iterable[Waiting]) -> SchedulingPlan:
        return SchedulingPlan(
            tuple(self.placements),
            tuple(waiting),
            tuple(self._deferral.evictions),
            tuple(self.backfill.forecasts),
            self._order,
            tuple(self._deferral.with_slots),
        )

    def _decide(self, queue: SchedulingQueue, pending: Unit) -> None:
        unit = pending.with_quota(self._quotas)
        self.decided.append(unit)
        if found := self._try_to_place(unit):
            self._record(unit, found)
        elif gangs.is_complete(self.cluster, unit) and self._deferral.defer(unit):
            # For fair share, its GPUs count as allocated, because they will be.
            self._shares.take(unit.project_id, unit.gpu_milli, 0, 0)
        else:
            # During this cycle nothing is released: equal units can neither be placed nor deferred.
            queue.drop(pending)

    def _try_to_place(self, unit: Unit) -> list[Found] | None:
        """Find nodes for the unit. Once one does not fit, equal units are not tried: nothing is released."""
        key = gangs.key(self.cluster, unit)
        if key in self._failed or not gangs.is_complete(self.cluster, unit):
            return None
        found = gangs.place(self.cluster, unit, self._at, self.backfill.allowing)
        if found is None:
            self._failed.add(key)
        return found

    def _record(self, unit: Unit, found: list[Found]) -> None:
        members = {member.instance_id: member for member in unit.members}
        for each in found:
            placed = each.placement
            if (quota := self._quotas.get(unit.project_id)) is not None:
                member = replace(members[placed.instance_id], quota=quota)
                self._quotas[unit.project_id] = quotas.after(
                    quota, member, each.model, placed.cpu_milli, placed.memory_mib
                )
            milli = sum(allocation.milli for allocation in placed.allocations)
            self._shares.take(unit.project_id, milli, placed.cpu_milli, placed.memory_mib)
            borrowed = bool(milli) and self._shares.beyond_guarantee(unit.project_id)
            self.placements.append(replace(placed, borrowed=True) if borrowed else placed)


def _has(unit: Unit, instance_id: str) -> bool:
    return any(member.instance_id == instance_id for member in unit.members)
