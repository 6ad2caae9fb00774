"""The decision: those that wait, in order, go where it costs least, and who cannot is promised a moment."""

from collections.abc import Iterator
from dataclasses import replace

from mooring.scheduler.backfill.deferral import Promises
from mooring.scheduler.backfill.planner import BackfillPlanner
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.unplaced import tell
from mooring.scheduler.feasibility import quotas
from mooring.scheduler.gangs import gangs
from mooring.scheduler.model import Placement, Quota, SchedulingPlan, Snapshot, Unplaced
from mooring.scheduler.packing.search import Found, Key
from mooring.scheduler.queue import SchedulingQueue, Shares
from mooring.scheduler.units import Unit, units_of


def schedule(snapshot: Snapshot, memory: CycleCache | None = None) -> SchedulingPlan:
    """Place what can be placed, in the order of the queue, and say of the rest when and why.

    Args:
        memory: of earlier looks; used by one look at a time.
    """
    return SchedulingCycle(snapshot, memory or CycleCache()).plan()


def plan_for(snapshot: Snapshot, instance_id: str, memory: CycleCache) -> SchedulingPlan:
    """The part of the plan that one request depends on: those ahead of it and itself; why only it waits."""
    return SchedulingCycle(snapshot, memory).plan_for(instance_id)


class SchedulingCycle:
    """One decision. What it places is taken in the memory's world, which the next look sets right again."""

    def __init__(self, snapshot: Snapshot, memory: CycleCache) -> None:
        memory.look(snapshot.nodes)
        world = memory.world
        world.judge_by(snapshot.potential)
        self.snapshot = snapshot
        self._at = snapshot.at
        self._census = memory.census
        self.world = world
        self._quotas: dict[str, Quota] = dict(snapshot.quotas)
        self._units = units_of(snapshot.requests)
        self._shares = Shares(snapshot, world.held, world.total)
        self.kept = BackfillPlanner(world, self._at)
        self._promises = Promises(snapshot, memory.starts, world, self._shares, self.kept)
        self.placements: list[Placement] = []
        self.decided: list[Unit] = []  # in the order in which it was their turn
        self._waiting: list[Unit] = []
        self._failed: set[Key] = set()

    def decisions(self) -> SchedulingPlan:
        """The plan without the reasons of those that wait, which cost more than the decisions."""
        for _ in self.steps():
            pass
        return self._told(())

    def plan(self) -> SchedulingPlan:
        for _ in self.steps():
            pass
        waiting = [unit.limited(self._quotas) for unit in self._waiting]
        return self._told(tell(self.world, self._census, waiting, self._at))

    def steps(self) -> Iterator[Unit]:
        """Decide of one after the other, each when it is asked for."""
        for unit in self._queue():
            self._decide(unit.limited(self._quotas))
            yield unit

    def plan_for(self, instance_id: str) -> SchedulingPlan:
        for unit in self.steps():
            if _has(unit, instance_id):
                break
        waiting = [unit.limited(self._quotas) for unit in self._waiting if _has(unit, instance_id)]
        return self._told(tell(self.world, self._census, waiting, self._at))

    def before(self, instance_id: str) -> Unit | None:
        """Decide of those ahead of one that waits, and return that one; None if it does not wait."""
        for unit in self._queue():
            if _has(unit, instance_id):
                return unit.limited(self._quotas)
            self._decide(unit.limited(self._quotas))
        return None

    def _queue(self) -> SchedulingQueue:
        return SchedulingQueue(self.snapshot, self._units, self._shares)

    def _told(self, unplaced: tuple[Unplaced, ...]) -> SchedulingPlan:
        return SchedulingPlan(
            tuple(self.placements),
            unplaced,
            tuple(self._promises.evictions),
            tuple(self.kept.forecasts),
            tuple(told.instance_id for told in unplaced),
            tuple(self._promises.promised),
        )

    def _decide(self, unit: Unit) -> None:
        self.decided.append(unit)
        if found := self._places(unit):
            self._take(unit, found)
            return
        self._waiting.append(unit)
        if gangs.whole(self.world, unit) and self._promises.promise(unit):
            # It will have this, and the projects that come after it are judged as if it had.
            self._shares.take(unit.project_id, unit.gpu_milli, 0, 0)

    def _places(self, unit: Unit) -> list[Found] | None:
        """What has failed once fails for all that are alike: nothing is given back during a look."""
        asked = gangs.key(self.world, unit)
        if asked in self._failed or not gangs.whole(self.world, unit):
            return None
        found = gangs.place(self.world, unit, self._at, self.kept.allowing)
        if found is None:
            self._failed.add(asked)
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
            milli = sum(grant.milli for grant in placed.grants)
            self._shares.take(unit.project_id, milli, placed.cpu_milli, placed.memory_mib)
            borrowed = bool(milli) and self._shares.beyond_guarantee(unit.project_id)
            self.placements.append(replace(placed, borrowed=True) if borrowed else placed)


def _has(unit: Unit, instance_id: str) -> bool:
    return any(member.instance_id == instance_id for member in unit.members)
