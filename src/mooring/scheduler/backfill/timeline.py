"""When a request fits a node, given the declared ends of the instances on it."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mooring.scheduler.feasibility.filters import fits, fitting_offers
from mooring.scheduler.model import NodeView, PlanTime, Request, Running
from mooring.scheduler.node_changes import added, without
from mooring.scheduler.packing.search import placement

# An instance that is overdue by this many overheads is stuck: its end is unknown.
_STUCK = 10


@dataclass(frozen=True, slots=True)
class BackfillSlot:
    """A part of a node that is kept free for a pending request."""

    request: Request
    index: int
    starts_at: float  # infinite: it depends on an instance without a declared end
    waits_for: frozenset[str]  # instances that run there and must end first

    def ends_at(self, at: PlanTime) -> float:
        return replace(at, now=self.starts_at).end_of(self.request)


def expected_end(running: Running, at: PlanTime) -> float:
    """When its resources are free again; infinite if unknown, also where it is long overdue."""
    if running.ends_at is None or running.ends_at + _STUCK * at.overhead_s < at.now:
        return inf
    return max(running.ends_at, at.now) + at.overhead_s


def at_time(node: NodeView, time: float, at: PlanTime) -> NodeView:
    """The node without the instances that will have ended by then."""
    return without(node, [each for each in node.running if expected_end(each, at) <= time])


def start_on(
    node: NodeView, request: Request, at: PlanTime, slots: Sequence[BackfillSlot] = ()
) -> float | None:
    """When the request could start there.

    Returns:
        Seconds since the epoch; infinite where an instance without a declared end is in the way; null where
        it does not fit even when all instances have ended.
    """
    if not could(node, request, at):
        return None
    times = sorted(_instants(node, at, slots))
    held = any(gpu.reserved for gpu in node.gpus)
    if not held:
        times = times[_first_alone(node, times, request, at) :]
    if not held and not slots:
        return times[0] if times else inf
    # Other slots start and end in between, so a later time may be worse.
    return next((time for time in times if _fits_at(node, time, request, at, slots)), inf)


def _first_alone(node: NodeView, times: Sequence[float], request: Request, at: PlanTime) -> int:
    """The first time at which it fits if slots are ignored. It then fits at all later times too."""
    return bisect_left(times, True, key=lambda time: _fits_at(node, time, request, at, ()))  # noqa: FBT003


def could(node: NodeView, request: Request, at: PlanTime) -> bool:
    """Whether it fits once all instances and reservations of the node have ended."""
    return _fits_without(node, node.running, request, at)


def must_end(node: NodeView, request: Request, at: PlanTime) -> frozenset[str]:
    """The instances that must end before the request fits, on a node where it could.

    The newest instances are left out if possible: this request still fits beside them. If the slot waited for
    them too, each cycle could place more of them, and the node would never be empty.
    """
    gone = list(node.running)
    for running in sorted(node.running, key=lambda each: (-each.since, each.instance_id)):
        fewer = [each for each in gone if each is not running]
        if _fits_without(node, fewer, request, at):
            gone = fewer
    return frozenset(each.instance_id for each in gone)


def _fits_without(node: NodeView, gone: Iterable[Running], request: Request, at: PlanTime) -> bool:
    """Whether it fits once these instances and all reservations have ended."""
    gpus = tuple(replace(gpu, reserved=()) for gpu in node.gpus)
    return fits(without(replace(node, gpus=gpus), gone), request, at)


def _instants(node: NodeView, at: PlanTime, slots: Iterable[BackfillSlot]) -> set[float]:
    times = {at.now}
    times.update(expected_end(running, at) for running in node.running)
    times.update(slot.ends_at(at) for slot in slots)
    times.update(period.to_at for gpu in node.gpus for period in gpu.reserved if period.to_at > at.now)
    return times - {inf}


def _fits_at(
    node: NodeView, time: float, request: Request, at: PlanTime, slots: Sequence[BackfillSlot]
) -> bool:
    """Whether it fits then, and leaves the slots free that overlap with it."""
    then = replace(at, now=time)
    future: NodeView | None = at_time(node, time, at)
    for slot in slots:
        if future and slot.starts_at < then.end_of(request) and time < slot.ends_at(at):
            future = _with(future, slot, at)
    return future is not None and fits(future, request, then)


def leaves(node: NodeView, slots: Sequence[BackfillSlot], at: PlanTime) -> bool:
    """Whether each slot of the node, in this order, still fits at its start."""
    return all(_leaves(node, slot, slots[:place], at) for place, slot in enumerate(slots))


def _leaves(node: NodeView, slot: BackfillSlot, earlier: Sequence[BackfillSlot], at: PlanTime) -> bool:
    """A slot without a start time is checked now, without the instances that it waits for."""
    start = at.now if slot.starts_at == inf else slot.starts_at
    gone = [
        each for each in node.running if each.instance_id in slot.waits_for or expected_end(each, at) <= start
    ]
    future: NodeView | None = without(node, gone)
    for other in earlier:
        if future and other.starts_at < slot.ends_at(at) and slot.starts_at < other.ends_at(at):
            future = _with(future, other, at)
    return future is not None and fits(future, slot.request, replace(at, now=start))


def _with(node: NodeView, slot: BackfillSlot, at: PlanTime) -> NodeView | None:
    """The node with the slot's request placed; null where it does not fit."""
    start = at.now if slot.starts_at == inf else slot.starts_at
    then = replace(at, now=start)
    offers = fitting_offers(node, slot.request, then)
    if not offers:
        return None
    placed = placement(node, slot.request, offers[0], then)
    return added(node, Running.of(placed, slot.request, then))


def in_the_way(node: NodeView, start: float, at: PlanTime) -> frozenset[str]:
    """The instances there that will have ended when a slot starts."""
    return frozenset(each.instance_id for each in node.running if expected_end(each, at) <= start)
