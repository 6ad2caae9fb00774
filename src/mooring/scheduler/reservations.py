"""Choose the GPUs of a reservation, and find the earliest time at which enough are available."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mooring.core.policy import Policy
from mooring.scheduler.feasibility.filters import admits
from mooring.scheduler.feasibility.gpu_rules import passing
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.model import GpuView, NodeView, Request, ReservedPeriod
from mooring.scheduler.packing import links
from mooring_client.schemas.nodes import NodeState


@dataclass(frozen=True, slots=True)
class ReservationSpec:
    """A reservation to be made: whole GPUs of one model for a period."""

    gpus: Request
    from_at: float
    to_at: float
    now: float = 0.0
    overhead_s: float = Policy.start_overhead_s

    @property
    def duration_s(self) -> float:
        return self.to_at - self.from_at


@dataclass(frozen=True, slots=True)
class ReservableGpus:
    """The GPUs that are available for the whole period of a reservation, by model and node."""

    by_model: Mapping[str, Mapping[str, Sequence[GpuView]]]

    def most(self) -> int:
        """The largest number of GPUs of one model."""
        return max(map(_count, self.by_model.values()), default=0)


def reservable_gpus(
    nodes: Iterable[NodeView],
    spec: ReservationSpec,
    ignored_id: str | None = None,
    always: Collection[str] = (),
) -> ReservableGpus:
    """The GPUs that are available for the requested period.

    Args:
        ignored_id: a reservation that does not count, because it is being changed.
        always: GPUs that count as available if healthy, whatever their node's state and their allocations.
    """
    found: dict[str, dict[str, list[GpuView]]] = {}
    for node, gpu, starts in _windows(nodes, spec, ignored_id, always):
        if gpu.uuid in always or any(first <= spec.from_at <= last for first, last in starts):
            found.setdefault(gpu.model, {}).setdefault(node.id, []).append(gpu)
    return ReservableGpus(found)


def choose(gpus: ReservableGpus, spec: ReservationSpec, kept: Collection[str] = ()) -> tuple[str, ...] | None:
    """UUIDs of the GPUs to reserve, on the fewest nodes and best connected; None if there are too few.

    Args:
        kept: GPUs to choose first if they are available.
    """
    count = spec.gpus.gpu_count
    models = sorted(gpus.by_model, key=lambda model: (_rank(gpus, spec, model, kept), model))
    for model in models:
        nodes = gpus.by_model[model]
        if _count(nodes) >= count:
            return _choose_of_model(nodes, count, kept)
    return None


def earliest(nodes: Iterable[NodeView], spec: ReservationSpec, ignored_id: str | None = None) -> float | None:
    """The earliest start, not before the requested one, with enough GPUs for the whole duration.

    None if that depends on an instance without a declared end, or there are too few GPUs in total.
    """
    changes: dict[str, list[tuple[float, int]]] = {}
    for _node, gpu, starts in _windows(nodes, spec, ignored_id):
        for first, last in starts:
            # At equal times, starts are counted before ends, because `last` itself is a valid start.
            changes.setdefault(gpu.model, []).extend([(first, 1), (last, -1)])
    found = (_first_time_with(spec.gpus.gpu_count, of_model) for of_model in changes.values())
    return min((time for time in found if time is not None), default=None)


def _first_time_with(count: int, changes: Iterable[tuple[float, int]]) -> float | None:
    available = 0
    for time, change in sorted(changes, key=lambda each: (each[0], -each[1])):
        available += change
        if available >= count:
            return time
    return None


def _windows(
    nodes: Iterable[NodeView], spec: ReservationSpec, ignored_id: str | None, always: Collection[str] = ()
) -> Iterator[tuple[NodeView, GpuView, list[tuple[float, float]]]]:
    """Each suitable GPU, with the intervals (first, last) in which the reservation could start."""
    for node in sorted(nodes, key=lambda each: each.id):
        ready = node.state is NodeState.READY and admits(node, spec.gpus)
        busy = _busy_until(node, spec)
        for gpu in passing(links.in_order(node.gpus), spec.gpus):
            if not gpu.healthy or not (ready or gpu.uuid in always):
                continue
            others = tuple(period for period in gpu.reserved if period.reservation_id != ignored_id)
            yield node, gpu, list(_starts(others, busy.get(gpu.uuid, 0.0), spec))


def _busy_until(node: NodeView, spec: ReservationSpec) -> dict[str, float]:
    """GPU -> end of the last allocation of other projects; infinite if one has no declared end."""
    busy: dict[str, float] = {}
    for running in node.running:
        if running.project_id == spec.gpus.project_id:
            continue
        end = inf if running.ends_at is None else running.ends_at + spec.overhead_s
        if end < spec.now:
            end = inf  # the instance is overdue: nobody knows when it ends
        for allocation in running.allocations:
            busy[allocation.gpu_uuid] = max(busy.get(allocation.gpu_uuid, 0.0), end)
    return busy


def _starts(
    periods: Iterable[ReservedPeriod], busy_until: float, spec: ReservationSpec
) -> Iterator[tuple[float, float]]:
    """The intervals in which the reservation could start, one per gap between other reservations."""
    free_from = max(spec.from_at, busy_until)
    for period in sorted(periods, key=lambda each: each.from_at):
        if free_from + spec.duration_s <= period.from_at:
            yield free_from, period.from_at - spec.duration_s
        free_from = max(free_from, period.to_at)
    if free_from < inf:
        yield free_from, inf


def _rank(gpus: ReservableGpus, spec: ReservationSpec, model: str, kept: Collection[str]) -> tuple[bool, int]:
    """Sort key: the model of the kept GPUs comes first, then the preferred models."""
    keeps = any(gpu.uuid in kept for of_node in gpus.by_model[model].values() for gpu in of_node)
    return not keeps, preference(spec.gpus, model) or 0


def _count(nodes: Mapping[str, Sequence[GpuView]]) -> int:
    return sum(map(len, nodes.values()))


def _choose_of_model(
    nodes: Mapping[str, Sequence[GpuView]], count: int, kept: Collection[str]
) -> tuple[str, ...]:
    chosen = [gpu.uuid for gpus in nodes.values() for gpu in gpus if gpu.uuid in kept][:count]
    left = {node_id: [gpu for gpu in gpus if gpu.uuid not in kept] for node_id, gpus in nodes.items()}
    used_nodes = {node_id for node_id, gpus in nodes.items() if any(gpu.uuid in chosen for gpu in gpus)}
    while len(chosen) < count:
        node_id = _next_node(left, count - len(chosen), used_nodes)
        chosen += links.choose(left.pop(node_id), count - len(chosen))
    return tuple(chosen)


def _next_node(left: Mapping[str, Sequence[GpuView]], wanted: int, used_nodes: Collection[str]) -> str:
    """Prefer used nodes, then of those with enough GPUs the one with the fewest, then that with the most."""
    return min(
        (node_id for node_id in left if left[node_id]),
        key=lambda node_id: (node_id not in used_nodes, *_fit_rank(len(left[node_id]), wanted), node_id),
    )


def _fit_rank(count: int, wanted: int) -> tuple[bool, int]:
    return (False, count) if count >= wanted else (True, -count)
