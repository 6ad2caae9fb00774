"""A node's future, as far as what runs there has declared its end: when a request would fit."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mooring.scheduler.feasibility.filters import fits, fitting_offers
from mooring.scheduler.model import NodeView, PlanTime, Request, Running
from mooring.scheduler.node_changes import added, as_running, without
from mooring.scheduler.packing.search import placement

# What should have ended for so many overheads is stuck: nobody knows when it will end.
_STUCK = 10


@dataclass(frozen=True, slots=True)
class BackfillSlot:
    """A part of a node that is kept for one that waits."""

    request: Request
    index: int
    starts_at: float  # infinite: it depends on something that declared no end
    waits_for: frozenset[str]  # instances that run there and must end first

    def ends_at(self, at: PlanTime) -> float:
        return replace(at, now=self.starts_at).end_of(self.request)


def expected_end(running: Running, at: PlanTime) -> float:
    """When what it holds can be given out again; infinite if nobody knows: it should have ended long ago."""
    if running.ends_at is None or running.ends_at + _STUCK * at.overhead_s < at.now:
        return inf
    return max(running.ends_at, at.now) + at.overhead_s


def at_time(node: NodeView, moment: float, at: PlanTime) -> NodeView:
    """The node as it will be: what has ended by then has gone."""
    return without(node, [each for each in node.running if expected_end(each, at) <= moment])


def start_on(
    node: NodeView, request: Request, at: PlanTime, kept: Sequence[BackfillSlot] = ()
) -> float | None:
    """When the request could start there.

    Returns:
        Seconds since the epoch; infinite where something is in the way that declared no end; null where it
        does not fit even when all that runs has ended.
    """
    if not could(node, request, at):
        return None
    times = sorted(_instants(node, at, kept))
    held = any(gpu.holds for gpu in node.gpus)
    if not held:
        times = times[_first_alone(node, times, request, at) :]
    if not held and not kept:
        return times[0] if times else inf
    # What is kept for others in between ends and begins: later is not always better.
    return next((time for time in times if _fits_at(node, time, request, at, kept)), inf)


def _first_alone(node: NodeView, times: Sequence[float], request: Request, at: PlanTime) -> int:
    """The first of the moments at which it fits, were nothing kept for others; it does at all that follow."""
    return bisect_left(times, True, key=lambda time: _fits_at(node, time, request, at, ()))  # noqa: FBT003


def could(node: NodeView, request: Request, at: PlanTime) -> bool:
    """Whether it fits once all that runs there has ended and all reservations are over."""
    return _fits_without(node, node.running, request, at)


def must_end(node: NodeView, request: Request, at: PlanTime) -> frozenset[str]:
    """What runs there and must end before it fits, of a node where it could.

    What came last stays if it can: it was let in beside this request. Were it thought away, more could follow
    in its place with every look, and the node would never run empty.
    """
    gone = list(node.running)
    for running in sorted(node.running, key=lambda each: (-each.since, each.instance_id)):
        fewer = [each for each in gone if each is not running]
        if _fits_without(node, fewer, request, at):
            gone = fewer
    return frozenset(each.instance_id for each in gone)


def _fits_without(node: NodeView, gone: Iterable[Running], request: Request, at: PlanTime) -> bool:
    """Whether it fits once these have ended, and all reservations are over."""
    gpus = tuple(replace(gpu, holds=()) for gpu in node.gpus)
    return fits(without(replace(node, gpus=gpus), gone), request, at)


def _instants(node: NodeView, at: PlanTime, kept: Iterable[BackfillSlot]) -> set[float]:
    times = {at.now}
    times.update(expected_end(running, at) for running in node.running)
    times.update(reservation.ends_at(at) for reservation in kept)
    times.update(hold.to_at for gpu in node.gpus for hold in gpu.holds if hold.to_at > at.now)
    return times - {inf}


def _fits_at(
    node: NodeView, time: float, request: Request, at: PlanTime, kept: Sequence[BackfillSlot]
) -> bool:
    """Whether it fits then, and what is kept for others at any time while it runs is left."""
    then = replace(at, now=time)
    world: NodeView | None = at_time(node, time, at)
    for reservation in kept:
        if world and reservation.starts_at < then.end_of(request) and time < reservation.ends_at(at):
            world = _with(world, reservation, at)
    return world is not None and fits(world, request, then)


def leaves(node: NodeView, kept: Sequence[BackfillSlot], at: PlanTime) -> bool:
    """Whether all that is kept on the node can still have it, in this order, when its time comes."""
    return all(_leaves(node, reservation, kept[:place], at) for place, reservation in enumerate(kept))


def _leaves(node: NodeView, reservation: BackfillSlot, earlier: Sequence[BackfillSlot], at: PlanTime) -> bool:
    """With an unknown start, what the reservation waits for is thought away, whenever that will be."""
    start = at.now if reservation.starts_at == inf else reservation.starts_at
    gone = [
        each
        for each in node.running
        if each.instance_id in reservation.waits_for or expected_end(each, at) <= start
    ]
    world: NodeView | None = without(node, gone)
    for other in earlier:
        if world and other.starts_at < reservation.ends_at(at) and reservation.starts_at < other.ends_at(at):
            world = _with(world, other, at)
    return world is not None and fits(world, reservation.request, replace(at, now=start))


def _with(node: NodeView, reservation: BackfillSlot, at: PlanTime) -> NodeView | None:
    """The node with what is kept given out; null where it is not there."""
    start = at.now if reservation.starts_at == inf else reservation.starts_at
    then = replace(at, now=start)
    offers = fitting_offers(node, reservation.request, then)
    if not offers:
        return None
    placed = placement(node, reservation.request, offers[0], then)
    return added(node, as_running(placed, reservation.request, then))


def in_the_way(node: NodeView, start: float, at: PlanTime) -> frozenset[str]:
    """What runs there now and will have gone when a reservation starts."""
    return frozenset(each.instance_id for each in node.running if expected_end(each, at) <= start)
