"""When a request fits a node, given the declared ends of the instances on it."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mooring.scheduler.feasibility.filters import fits
from mooring.scheduler.model import NodeView, PlanTime, Request, Running
from mooring.scheduler.node_changes import without
from mooring.scheduler.packing.search import with_request

# An instance that is overdue by this multiple of `PlanTime.overhead_s` is stuck: its end is unknown.
_STUCK_AFTER = 10


@dataclass(frozen=True, slots=True)
class BackfillSlot:
    """A part of a node that is kept free for a pending request."""

    request: Request
    index: int
    starts_at: float  # infinite: the start depends on an instance without a declared end
    waits_for: frozenset[str]  # instances on the node that must end first

    def ends_at(self, at: PlanTime) -> float:
        return replace(at, now=self.starts_at).end_of(self.request)


def expected_end(running: Running, at: PlanTime) -> float:
    """When the instance's resources are free; infinite if it has no declared end or is long overdue."""
    if running.ends_at is None or running.ends_at + _STUCK_AFTER * at.overhead_s < at.now:
        return inf
    return max(running.ends_at, at.now) + at.overhead_s


def at_time(node: NodeView, time: float, at: PlanTime) -> NodeView:
    """The node without the instances that will have ended by this time."""
    return without(node, [each for each in node.running if expected_end(each, at) <= time])


def start_on(
    node: NodeView, request: Request, at: PlanTime, slots: Sequence[BackfillSlot] = ()
) -> float | None:
    """When the request could start on the node.

    Returns:
        Seconds since the epoch; infinite if that depends on something without a known end; None if it does
        not fit even when all instances have ended.
    """
    if not fits_once_all_end(node, request, at):
        return None
    times = sorted(_instants(node, at, slots))
    has_reserved = any(gpu.reserved for gpu in node.gpus)
    if not has_reserved:
        times = times[_first_without_slots(node, times, request, at) :]
    if not has_reserved and not slots:
        return times[0] if times else inf
    # Slots and reservations start and end in between, so the request may fit at one time and not later.
    return next((time for time in times if _fits_at(node, time, request, at, slots)), inf)


def _first_without_slots(node: NodeView, times: Sequence[float], request: Request, at: PlanTime) -> int:
    """The position of the first time at which the request fits, ignoring slots. It fits at all later ones."""
    return bisect_left(times, True, key=lambda time: _fits_at(node, time, request, at, ()))  # noqa: FBT003


def fits_once_all_end(node: NodeView, request: Request, at: PlanTime) -> bool:
    """Whether the request fits once all instances and reservations of the node have ended."""
    return _fits_without(node, node.running, request, at)


def must_end(node: NodeView, request: Request, at: PlanTime) -> frozenset[str]:
    """The instances that must end before the request fits, on a node where it could.

    Instances beside which the request still fits are left out, the newest first. If the slot waited for them
    too, each cycle could place more of them, and the node would never be empty.
    """
    gone = list(node.running)
    for running in sorted(node.running, key=lambda each: (-each.since, each.instance_id)):
        fewer = [each for each in gone if each is not running]
        if _fits_without(node, fewer, request, at):
            gone = fewer
    return frozenset(each.instance_id for each in gone)


def _fits_without(node: NodeView, gone: Iterable[Running], request: Request, at: PlanTime) -> bool:
    """Whether the request fits once these instances and all reservations have ended."""
    gpus = tuple(replace(gpu, reserved=()) for gpu in node.gpus)
    return fits(without(replace(node, gpus=gpus), gone), request, at)


def _instants(node: NodeView, at: PlanTime, slots: Iterable[BackfillSlot]) -> set[float]:
    """Now, and the times at which something on the node ends."""
    times = {at.now}
    times.update(expected_end(running, at) for running in node.running)
    times.update(slot.ends_at(at) for slot in slots)
    times.update(period.to_at for gpu in node.gpus for period in gpu.reserved if period.to_at > at.now)
    return times - {inf}


def _fits_at(
    node: NodeView, time: float, request: Request, at: PlanTime, slots: Sequence[BackfillSlot]
) -> bool:
    """Whether the request fits at this time, and leaves the slots free that overlap with it."""
    then = replace(at, now=time)
    future: NodeView | None = at_time(node, time, at)
    for slot in slots:
        if future and slot.starts_at < then.end_of(request) and time < slot.ends_at(at):
            future = _with_slot(future, slot, at)
    return future is not None and fits(future, request, then)


def slots_still_fit(node: NodeView, slots: Sequence[BackfillSlot], at: PlanTime) -> bool:
    """Whether each slot of the node, in this order, still fits at its start."""
    return all(_slot_still_fits(node, slot, slots[:place], at) for place, slot in enumerate(slots))


def _slot_still_fits(
    node: NodeView, slot: BackfillSlot, earlier: Sequence[BackfillSlot], at: PlanTime
) -> bool:
    """A slot without a start time is checked now, without the instances that it waits for."""
    start = at.now if slot.starts_at == inf else slot.starts_at
    gone = [
        each for each in node.running if each.instance_id in slot.waits_for or expected_end(each, at) <= start
    ]
    future: NodeView | None = without(node, gone)
    for other in earlier:
        if future and other.starts_at < slot.ends_at(at) and slot.starts_at < other.ends_at(at):
            future = _with_slot(future, other, at)
    return future is not None and fits(future, slot.request, replace(at, now=start))


def _with_slot(node: NodeView, slot: BackfillSlot, at: PlanTime) -> NodeView | None:
    """The node with the slot's request placed; None if it does not fit."""
    start = at.now if slot.starts_at == inf else slot.starts_at
    return with_request(node, slot.request, replace(at, now=start))


def ended_by(node: NodeView, time: float, at: PlanTime) -> frozenset[str]:
    """The instances of the node that will have ended at this time."""
    return frozenset(each.instance_id for each in node.running if expected_end(each, at) <= time)
