"""Where one that waits stands: who is ahead of it and why, and when it will start.

Nothing here decides. It is the queue as it is at this moment, as if nothing more arrived and all ran for as
long as was declared.
"""

from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from mooring.scheduler.memory import Memory
from mooring.scheduler.model import Forecast, Snapshot
from mooring.scheduler.order import Ahead, Queue, Rank, Shares, because
from mooring.scheduler.schedule import Look
from mooring.scheduler.search import find
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


def line(snapshot: Snapshot, memory: Memory | None = None) -> Line:
    """The queue as a look begins with it."""
    memory = memory or Memory()
    memory.look(snapshot.nodes)
    shares = Shares(snapshot, memory.world.held, memory.world.total)
    queue = Queue(snapshot, units_of(snapshot.requests), shares)
    ordered = [(member, queue.rank(unit)) for unit in queue for member in unit.members]
    return Line(tuple(member.instance_id for member, _ in ordered), tuple(rank for _, rank in ordered))


def forecast(snapshot: Snapshot, instance_id: str, memory: Memory | None = None) -> Forecast:
    """When it will start if each that is ahead gets the first moment that it can.

    Its basis is `waits_for`. `starts_at` is null where something without a declared end is in the way, where
    it waits for a quota or for something that nobody knows, or where too many are ahead to tell.
    """
    policy = replace(snapshot.policy, backfill="conservative")
    look = Look(replace(snapshot, policy=policy), memory or Memory())
    plan = look.until(instance_id)
    if any(placed.instance_id == instance_id for placed in plan.placements):
        return Forecast(instance_id, snapshot.now, (), ())
    told = (each for each in plan.forecasts if each.instance_id == instance_id)
    return next(told, Forecast(instance_id, None, (), ()))


def max_duration_now(snapshot: Snapshot, instance_id: str, memory: Memory | None = None) -> int | None:
    """The longest `max_duration_s` with which it would start now, beside what is kept for those ahead.

    None where no duration helps: it does not fit, or nothing that is kept is in its way.
    """
    look = Look(snapshot, memory or Memory())
    unit = look.before(instance_id)
    if unit is None or unit.gang is not None:
        return None
    at, request = snapshot.at, unit.first
    ends = {
        int(part.starts_at - at.now - at.overhead_s)
        for parts in look.kept.on.values()
        for part in parts
        if part.starts_at < inf
    }
    for seconds in sorted(ends, reverse=True):
        if seconds < 1 or seconds >= (request.max_duration_s or inf):
            continue
        shorter = replace(request, max_duration_s=seconds)
        if find(look.world, shorter, at, None, look.kept.allowing(shorter)):
            return seconds
    return None
