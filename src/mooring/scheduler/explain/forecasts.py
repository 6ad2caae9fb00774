"""Where one that waits stands: who is ahead of it and why, and when it will start.

Nothing here decides. It is the queue as it is at this moment, as if nothing more arrived and all ran for as
long as was declared.
"""

from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Forecast, Snapshot
from mooring.scheduler.packing.search import find
from mooring.scheduler.queue import Ahead, Rank, SchedulingQueue, Shares, because
from mooring.scheduler.schedule import SchedulingCycle
from mooring.scheduler.units import units_of


@dataclass(frozen=True, slots=True)
class Line:
    """All that wait, the first first; members of a gang stand together."""

    instance_ids: tuple[str, ...]
    ranks: tuple[Rank, ...]

    def position(self, instance_id: str) -> int:
        """From 1. ValueError if it does not wait."""
        return self.instance_ids.index(instance_id) + 1

    def ahead(self, instance_id: str, most: int = 20) -> tuple[Ahead, ...]:
        """The first of those that come before it, and the rule by which each does; its own gang left out."""
        place = self.instance_ids.index(instance_id)
        mine = self.ranks[place]
        others = (
            Ahead(other, because(rank, mine))
            for other, rank in zip(self.instance_ids[:place], self.ranks[:place], strict=True)
            if rank != mine
        )
        return tuple(islice(others, most))


def line(snapshot: Snapshot, cache: CycleCache | None = None) -> Line:
    """The queue as a look begins with it."""
    cache = cache or CycleCache()
    cache.update(snapshot.nodes)
    shares = Shares(snapshot, cache.cluster.held, cache.cluster.total)
    queue = SchedulingQueue(snapshot, units_of(snapshot.requests), shares)
    ordered = [(member, queue.rank(unit)) for unit in queue for member in unit.members]
    return Line(tuple(member.instance_id for member, _ in ordered), tuple(rank for _, rank in ordered))


class Forecasts:
    """When each that waits will start if each that is ahead gets the first moment that it can.

    The basis of a forecast is `waits_for`. `starts_at` is null where something without a declared end is in
    the way, where it waits for a quota or for something that nobody knows, or where too many are ahead to
    tell.

    Args:
        memory: for nothing else for as long as this is asked: it holds how far the queue was decided.
    """

    def __init__(self, snapshot: Snapshot, cache: CycleCache) -> None:
        policy = replace(snapshot.policy, backfill="conservative")
        self._now = snapshot.now
        self._cycle = SchedulingCycle(replace(snapshot, policy=policy), cache)
        self._steps = self._cycle.steps()
        self._placements = 0  # noted so far, as are the forecasts
        self._forecasts = 0
        self._decided: set[str] = set()
        self._known: dict[str, Forecast] = {}

    def of(self, instance_id: str) -> Forecast:
        """Decides of it and of those ahead of it, unless an earlier question did."""
        while instance_id not in self._decided and (unit := next(self._steps, None)) is not None:
            self._decided.update(member.instance_id for member in unit.members)
            self._note()
        return self._known.get(instance_id, Forecast(instance_id, None, (), ()))

    def _note(self) -> None:
        """What the last step decided."""
        placements, forecasts = self._cycle.placements, self._cycle.backfill.forecasts
        for placed in placements[self._placements :]:
            self._known[placed.instance_id] = Forecast(placed.instance_id, self._now, (), ())
        for each in forecasts[self._forecasts :]:
            self._known.setdefault(each.instance_id, each)
        self._placements, self._forecasts = len(placements), len(forecasts)


def max_duration_now(snapshot: Snapshot, instance_id: str, cache: CycleCache | None = None) -> int | None:
    """The longest `max_duration_s` with which the instance would start now.

    None where no duration helps: the instance does not fit, or neither a backfill slot nor another project's
    reservation is in its way.
    """
    cycle = SchedulingCycle(snapshot, cache or CycleCache())
    if not _could_start(cycle, instance_id):
        return None
    unit = cycle.before(instance_id)
    if unit is None or unit.gang is not None:
        return None
    at, request, cluster = snapshot.at, unit.first, cycle.cluster
    ends = {
        part.starts_at
        for parts in cycle.backfill.slots_by_node.values()
        for part in parts
        if part.starts_at < inf
    }
    for index in cluster.with_holds:
        periods = [period for gpu in cluster.node(index).gpus for period in gpu.holds]
        ends.update(period.from_at for period in periods if period.project_id != request.project_id)
    for seconds in sorted({int(end - at.now - at.overhead_s) for end in ends}, reverse=True):
        if seconds < 1 or seconds >= (request.max_duration_s or inf):
            continue
        shorter = replace(request, max_duration_s=seconds)
        if find(cluster, shorter, at, None, cycle.backfill.allowing(shorter)):
            return seconds
    return None


def _could_start(cycle: SchedulingCycle, instance_id: str) -> bool:
    """Whether it would start if nothing were ahead of it and it ended at once. If not, no duration helps, and
    those ahead of it need not be decided.
    """
    snapshot = cycle.snapshot
    request = next((each for each in snapshot.requests if each.instance_id == instance_id), None)
    return request is not None and bool(find(cycle.cluster, replace(request, max_duration_s=1), snapshot.at))
