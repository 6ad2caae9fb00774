"""A scheduling cycle: places requests in the order of the queue, and defers those that do not fit."""

from collections.abc import Iterator
from dataclasses import replace

from mooring.scheduler.backfill.deferral import DeferralPlanner
from mooring.scheduler.backfill.planner import BackfillPlanner
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.unplaced import explain_all
from mooring.scheduler.feasibility import quotas
from mooring.scheduler.gangs import gangs
from mooring.scheduler.model import Placement, Quota, SchedulingPlan, Snapshot, Unplaced
from mooring.scheduler.packing.search import Found, Key
from mooring.scheduler.queue import SchedulingQueue, Shares
from mooring.scheduler.units import Unit, units_of


def schedule(snapshot: Snapshot, cache: CycleCache | None = None) -> SchedulingPlan:
    """Place the requests that fit, in the order of the queue, and explain and forecast the others.

    Args:
        cache: state of earlier cycles; only one cycle may use it at a time.
    """
    return SchedulingCycle(snapshot, cache or CycleCache()).plan()


def plan_for(snapshot: Snapshot, instance_id: str, cache: CycleCache) -> SchedulingPlan:
    """The plan for one request and those ahead of it. Only this request is explained."""
    return SchedulingCycle(snapshot, cache).plan_for(instance_id)


class SchedulingCycle:
    """Placements change the cluster state in the cache; the next cycle's snapshot corrects it."""

    def __init__(self, snapshot: Snapshot, cache: CycleCache) -> None:
        cache.update(snapshot.nodes)
        cluster = cache.cluster
        cluster.set_potential(snapshot.potential)
        self.snapshot = snapshot
        self._at = snapshot.at
        self._node_groups = cache.node_groups
        self.cluster = cluster
        self._quotas: dict[str, Quota] = dict(snapshot.quotas)
        self._units = units_of(snapshot.requests)
        self._shares = Shares(snapshot, cluster.held, cluster.total)
        self.backfill = BackfillPlanner(cluster, self._at)
        self._deferral = DeferralPlanner(snapshot, cache.start_times, cluster, self._shares, self.backfill)
        self.placements: list[Placement] = []
        self.decided: list[Unit] = []  # in the order of the queue
        self._waiting: list[Unit] = []
        self._failed: set[Key] = set()

    def decisions(self) -> SchedulingPlan:
        """The plan without explanations, which cost more than the decisions."""
        for _ in self.steps():
            pass
        return self._plan(())

    def plan(self) -> SchedulingPlan:
        for _ in self.steps():
            pass
        waiting = [unit.limited(self._quotas) for unit in self._waiting]
        return self._plan(explain_all(self.cluster, self._node_groups, waiting, self._at))

    def steps(self) -> Iterator[Unit]:
        """Decide one unit at a time, as the caller iterates."""
        for unit in self._queue():
            self._decide(unit.limited(self._quotas))
            yield unit

    def plan_for(self, instance_id: str) -> SchedulingPlan:
        for unit in self.steps():
            if _has(unit, instance_id):
                break
        waiting = [unit.limited(self._quotas) for unit in self._waiting if _has(unit, instance_id)]
        return self._plan(explain_all(self.cluster, self._node_groups, waiting, self._at))

    def before(self, instance_id: str) -> Unit | None:
        """Decide the units ahead of an instance, and return its unit; None if it is not pending."""
        for unit in self._queue():
            if _has(unit, instance_id):
                return unit.limited(self._quotas)
            self._decide(unit.limited(self._quotas))
        return None

    def _queue(self) -> SchedulingQueue:
        return SchedulingQueue(self.snapshot, self._units, self._shares)

    def _plan(self, unplaced: tuple[Unplaced, ...]) -> SchedulingPlan:
        return SchedulingPlan(
            tuple(self.placements),
            unplaced,
            tuple(self._deferral.evictions),
            tuple(self.backfill.forecasts),
            tuple(each.instance_id for each in unplaced),
            tuple(self._deferral.with_slots),
        )

    def _decide(self, unit: Unit) -> None:
        self.decided.append(unit)
        if found := self._places(unit):
            self._take(unit, found)
            return
        self._waiting.append(unit)
        if gangs.whole(self.cluster, unit) and self._deferral.defer(unit):
            # Fair share counts it as placed, because it will be.
            self._shares.take(unit.project_id, unit.gpu_milli, 0, 0)

    def _places(self, unit: Unit) -> list[Found] | None:
        """If a unit does not fit, equal ones are not tried: nothing is released during a cycle."""
        key = gangs.key(self.cluster, unit)
        if key in self._failed or not gangs.whole(self.cluster, unit):
            return None
        found = gangs.place(self.cluster, unit, self._at, self.backfill.allowing)
        if found is None:
            self._failed.add(key)
        return found

    def _take(self, unit: Unit, found: list[Found]) -> None:
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
