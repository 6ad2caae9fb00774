"""The queue position of a pending instance, which instances are ahead and why, and its forecast start.

Forecasts assume that no request arrives and that each instance runs for its declared duration.
"""

from dataclasses import replace
from math import inf

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Forecast, Snapshot
from mooring.scheduler.packing.search import find
from mooring.scheduler.queue import ProjectShares, SchedulingQueue
from mooring.scheduler.queue_order import QueueOrder
from mooring.scheduler.schedule import SchedulingCycle


def queue_order(snapshot: Snapshot, cache: CycleCache | None = None) -> QueueOrder:
    """The queue at the start of a scheduling cycle."""
    cache = cache or CycleCache()
    cache.update(snapshot.nodes)
    cache.units.update(snapshot.requests)
    shares = ProjectShares(snapshot, cache.cluster.held, cache.cluster.total)
    return SchedulingQueue(snapshot, cache.units, shares).order()


class Forecasts:
    """When each pending instance starts if each one ahead of it starts at its earliest time.

    A forecast is based on the declared ends of the instances in its `waits_for`. Its `starts_at` is None if
    that depends on an instance without a declared end or on a quota, or if too many instances are ahead.

    Args:
        cache: must not be used by others: it contains the state of the queue simulated so far.
    """

    def __init__(self, snapshot: Snapshot, cache: CycleCache) -> None:
        policy = snapshot.policy.model_copy(update={"backfill": "conservative"})
        self._now = snapshot.now
        self._cycle = SchedulingCycle(replace(snapshot, policy=policy), cache)
        self._steps = self._cycle.steps()
        self._placements_seen = 0
        self._forecasts_seen = 0
        self._decided: set[str] = set()
        self._forecasts: dict[str, Forecast] = {}

    def of(self, instance_id: str) -> Forecast:
        """Simulate the queue up to the instance, unless an earlier call did.

        The queue leaves it out if an equal instance ahead of it has no start time: then it has none either.
        """
        while instance_id not in self._decided and (unit := next(self._steps, None)) is not None:
            self._decided.update(member.instance_id for member in unit.members)
            self._record()
        return self._forecasts.get(instance_id, Forecast(instance_id, None, (), ()))

    def _record(self) -> None:
        """Record the results of the last step."""
        placements, forecasts = self._cycle.placements, self._cycle.backfill.forecasts
        for placed in placements[self._placements_seen :]:
            self._forecasts[placed.instance_id] = Forecast(placed.instance_id, self._now, (), ())
        for each in forecasts[self._forecasts_seen :]:
            self._forecasts.setdefault(each.instance_id, each)
        self._placements_seen, self._forecasts_seen = len(placements), len(forecasts)


def max_duration_now(snapshot: Snapshot, instance_id: str, cache: CycleCache | None = None) -> int | None:
    """The longest `max_duration_s` with which the instance would start now.

    None if no duration helps: the instance does not fit, or neither a backfill slot nor another project's
    reservation is in its way. None also for the members of gangs.
    """
    cycle = SchedulingCycle(snapshot, cache or CycleCache())
    if not _could_start(cycle, instance_id):
        return None
    unit = cycle.before(instance_id)
    if unit is None or unit.gang is not None:
        return None
    at, request, cluster = snapshot.at, unit.first, cycle.cluster
    slots = (slot for of_node in cycle.backfill.slots_by_node.values() for slot in of_node)
    ends = {slot.starts_at for slot in slots if slot.starts_at < inf}
    for index in cluster.with_reserved_gpus:
        periods = [period for gpu in cluster.node(index).gpus for period in gpu.reserved]
        ends.update(period.from_at for period in periods if period.project_id != request.project_id)
    for seconds in sorted({int(end - at.now - at.overhead_s) for end in ends}, reverse=True):
        if seconds < 1 or seconds >= (request.max_duration_s or inf):
            continue
        shorter = replace(request, max_duration_s=seconds)
        if find(cluster, shorter, at, None, cycle.backfill.allowing(shorter)):
            return seconds
    return None


def _could_start(cycle: SchedulingCycle, instance_id: str) -> bool:
    """Whether it would start with an empty queue and the shortest duration; cheaper than a simulation."""
    snapshot = cycle.snapshot
    request = next((each for each in snapshot.requests if each.instance_id == instance_id), None)
    return request is not None and bool(find(cycle.cluster, replace(request, max_duration_s=1), snapshot.at))
