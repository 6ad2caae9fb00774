"""Backfill slots of pending requests, and the earliest start times.

EASY: the first request that does not fit gets a slot: a node and a start time. A later request may start only
if that node can still host the first one at that time. Conservative: each pending request gets a slot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from operator import itemgetter

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from mooring.scheduler.backfill.timeline import (
    BackfillSlot,
    ended_by,
    expected_end,
    must_end,
    slots_still_fit,
    start_on,
)
from mooring.scheduler.cluster import ClusterState, Mask
from mooring.scheduler.feasibility import filters, gpu_offers
from mooring.scheduler.feasibility.filters import closed
from mooring.scheduler.feasibility.gpu_rules import passing
from mooring.scheduler.model import Forecast, NodeView, Placement, PlanTime, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing import search
from mooring.scheduler.packing.node_classes import Suitable, owner_of
from mooring.scheduler.units import Unit

# The start times of one shape on 10,000 nodes take 80 kB.
_MAX_SHAPES = 64


class BackfillPlanner:
    """The backfill slots of each node, in the order in which they were added."""

    def __init__(self, cluster: ClusterState, at: PlanTime) -> None:
        self._cluster = cluster
        self._at = at
        self.slots_by_node: dict[int, list[BackfillSlot]] = {}
        self.forecasts: list[Forecast] = []

    def add(self, unit: Unit, slots: Sequence[BackfillSlot]) -> None:
        for slot in slots:
            self.slots_by_node.setdefault(slot.index, []).append(slot)
        self.forecasts.extend(_forecasts(self._cluster, unit, slots))

    def allowing(self, request: Request) -> search.Allowed | None:
        """A check that a placement leaves the slots of its node free; None: there are no slots.

        A placement only on GPUs that are now reserved for the request's project passes in any case.
        """
        if not self.slots_by_node:
            return None

        def allow(index: int, placed: Placement) -> bool:
            slots, node = self.slots_by_node.get(index), self._cluster.node(index)
            if not slots or _all_reserved_for_own(node, placed, request, self._at):
                return True
            return slots_still_fit(with_placement(node, placed, request, self._at), slots, self._at)

        return allow

    def slots(self, index: int) -> Sequence[BackfillSlot]:
        return self.slots_by_node.get(index, ())


def _all_reserved_for_own(node: NodeView, placed: Placement, request: Request, at: PlanTime) -> bool:
    gpus = [gpu for gpu in node.gpus if gpu.uuid in placed.gpu_uuids]
    return bool(gpus) and all(gpu_offers.own_reserved(gpu, request, at) for gpu in gpus)


def _forecasts(cluster: ClusterState, unit: Unit, slots: Sequence[BackfillSlot]) -> Iterable[Forecast]:
    """One forecast for each member of a unit; all start together."""
    starts_at = max(slot.starts_at for slot in slots)
    waits_for = tuple(sorted(set().union(*(slot.waits_for for slot in slots))))
    node_ids = {slot.request.instance_id: cluster.node(slot.index).id for slot in slots}
    for member in unit.members:
        node_id = node_ids[member.instance_id]
        yield Forecast(member.instance_id, None if starts_at == inf else starts_at, (node_id,), waits_for)


@dataclass(slots=True)
class _Bounds:
    """Lower bounds of the start time of a request, by node; NaN where it can never start."""

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    seen: int = 0  # changes of the cluster that `values` includes


class StartTimes:
    """Start times of requests, cached by shape: only nodes that changed are computed again."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._bounds: LRUCache[search.Key, _Bounds] = LRUCache(_MAX_SHAPES)

    def clear(self) -> None:
        self._bounds.clear()

    def first(
        self, request: Request, at: PlanTime, backfill: BackfillPlanner, among: Mask | None = None
    ) -> BackfillSlot | None:
        """The earliest slot that leaves earlier slots free, on the first such node by id.

        None if no declared ends make room for the request on any node.
        """
        bounds = self.bounds(request, at)
        values = bounds.values.copy()
        if among is not None:
            values[~among] = nan
        while True:
            index = self._lowest(values)
            if index is None:
                return None
            node = self._cluster.node(index)
            start = start_on(node, request, at, backfill.slots(index))
            if start is not None and start <= values[index]:
                return BackfillSlot(request, index, start, ended_by(node, start, at))
            values[index] = nan if start is None else start
            if not backfill.slots(index):
                bounds.values[index] = values[index]  # the start itself is the best bound

    def _lowest(self, values: NDArray[np.float64]) -> int | None:
        """The node with the lowest finite value; of equals, the first by id."""
        finite = np.flatnonzero(values < inf)
        if not len(finite):
            return None
        lowest = finite[values[finite] == values[finite].min()]
        return min((int(index) for index in lowest), key=lambda index: self._cluster.node(index).id)

    def draining(self, request: Request, at: PlanTime, backfill: BackfillPlanner) -> BackfillSlot | None:
        """A slot without a start time on a node that is drained: that with the fewest GPUs in endless use."""
        values = self.bounds(request, at).values
        candidates = [
            (self._endless_use(node, at), node.id, int(index))
            for index in np.flatnonzero(values == inf)
            for node in [self._cluster.node(int(index))]
            if not backfill.slots(int(index))
        ]
        for _use, _id, index in sorted(candidates):
            node = self._cluster.node(index)
            if start_on(node, request, at) is not None:
                return BackfillSlot(request, index, inf, must_end(node, request, at))
        return None

    @staticmethod
    def _endless_use(node: NodeView, at: PlanTime) -> tuple[int, int]:
        endless = [each for each in node.running if expected_end(each, at) == inf]
        return sum(each.gpu_milli for each in endless), len(endless)

    # ---- cached bounds

    def bounds(self, request: Request, at: PlanTime) -> _Bounds:
        own = self._cluster.reserved_for(request.project_id)
        key = (*search.shape(request), owner_of(request), own, *search.choices(self._cluster, request))
        bounds = self._bounds.setdefault(key, _Bounds())
        self._update(bounds, request, at)
        return bounds

    def _update(self, bounds: _Bounds, request: Request, at: PlanTime) -> None:
        cluster = self._cluster
        if len(bounds.values) < len(cluster):
            bounds.values = np.concatenate([bounds.values, np.full(len(cluster) - len(bounds.values), nan)])
        outdated = set(cluster.changes[bounds.seen :]) | cluster.with_reserved_gpus
        # A bound in the past becomes the present, or rises if it was the end of an instance that is stuck.
        outdated.update(np.flatnonzero(bounds.values <= at.now + at.overhead_s).tolist())
        suitable = cluster.suitable(request) if request.gpu_count and outdated else []
        for index in outdated:
            node = cluster.nodes[index]
            bounds.values[index] = nan if node is None else self._bound(index, node, request, at, suitable)
        bounds.seen = len(cluster.changes)

    def _bound(
        self, index: int, node: NodeView, request: Request, at: PlanTime, suitable: Sequence[Suitable]
    ) -> float:
        if closed(node, request):
            return nan
        kind = int(self._cluster.kind_of[index])
        if len(self._cluster.kinds[kind].places) < request.gpu_count:
            return nan
        if request.gpu_count and not suitable[kind].models:
            return nan
        if request.mig_profile is not None or index in self._cluster.with_reserved_gpus:
            return at.now
        return _bound(node, request, at)


def _bound(node: NodeView, request: Request, at: PlanTime) -> float:
    """A lower bound of `start_on`, nearly always equal to it, but faster: no nodes are copied."""
    free = {gpu.uuid: gpu.milli_free for gpu in passing(node.gpus, request) if gpu.healthy}
    if len(free) < request.gpu_count:
        return nan
    lacks = request.gpu_count - sum([milli >= request.gpu_milli for milli in free.values()])
    short = [
        (amount, returned)
        for lacking, returned in filters.RULES.amounts
        if (amount := lacking(node, request)) > 0
    ]
    if lacks <= 0 and not short:
        return at.now
    for end, running in sorted([(expected_end(each, at), each) for each in node.running], key=itemgetter(0)):
        if short:
            short = [(left, freed) for amount, freed in short if (left := amount - freed(running)) > 0]
        for allocation in running.allocations:
            if allocation.gpu_uuid in free:
                before = free[allocation.gpu_uuid]
                free[allocation.gpu_uuid] = before + allocation.milli
                lacks -= before < request.gpu_milli <= before + allocation.milli
        if lacks <= 0 and not short:
            return end
    return nan
