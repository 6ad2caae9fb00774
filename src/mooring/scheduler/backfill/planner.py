"""What is kept for those that wait, and the moments from which it can be.

EASY: the first that does not fit gets a node and a moment; whatever comes later may start only if the node
can still host the first at that moment. Conservative: each that waits gets one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from mooring.core.node import NodeState
from mooring.scheduler.backfill.timeline import (
    BackfillSlot,
    expected_end,
    in_the_way,
    leaves,
    must_end,
    start_on,
)
from mooring.scheduler.cluster import ClusterState, Mask
from mooring.scheduler.feasibility import disk, gpu_offers
from mooring.scheduler.feasibility.filters import admits
from mooring.scheduler.feasibility.needs import needs
from mooring.scheduler.model import Forecast, NodeView, Placement, PlanTime, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing import search
from mooring.scheduler.packing.node_classes import owner_of
from mooring.scheduler.units import Unit

# Moments of a shape for 10,000 nodes take 80 kB.
_MAX_SHAPES = 64


class BackfillPlanner:
    """What is kept, node by node, in the order in which it was promised."""

    def __init__(self, world: ClusterState, at: PlanTime) -> None:
        self._world = world
        self._at = at
        self.on: dict[int, list[BackfillSlot]] = {}
        self.forecasts: list[Forecast] = []

    def keep(self, unit: Unit, parts: Sequence[BackfillSlot]) -> None:
        for part in parts:
            self.on.setdefault(part.index, []).append(part)
        starts_at = max(part.starts_at for part in parts)
        self.forecasts.extend(forecast(self._world, unit, parts, starts_at))

    def allowing(self, request: Request) -> search.Allowed | None:
        """Whether what is kept on a node is still there if this is placed so; None: nothing is kept.

        Cards that are reserved for its project now are its own, whatever others were promised of them.
        """
        if not self.on:
            return None

        def allow(index: int, placed: Placement) -> bool:
            kept, node = self.on.get(index), self._world.node(index)
            if not kept or _all_own(node, placed, request, self._at):
                return True
            return leaves(with_placement(node, placed, request, self._at), kept, self._at)

        return allow

    def kept(self, index: int) -> Sequence[BackfillSlot]:
        return self.on.get(index, ())


def _all_own(node: NodeView, placed: Placement, request: Request, at: PlanTime) -> bool:
    given = [gpu for gpu in node.gpus if gpu.uuid in placed.gpu_uuids]
    return bool(given) and all(gpu_offers.own_reserved(gpu, request, at) for gpu in given)


def forecast(
    world: ClusterState, unit: Unit, parts: Sequence[BackfillSlot], starts_at: float
) -> Iterable[Forecast]:
    """One for each member of a unit; all of them start together."""
    waits_for = tuple(sorted(set().union(*(part.waits_for for part in parts))))
    nodes = tuple(sorted({world.node(part.index).id for part in parts}))
    for member in unit.members:
        mine = [world.node(part.index).id for part in parts if part.request.instance_id == member.instance_id]
        yield Forecast(
            member.instance_id, None if starts_at == inf else starts_at, tuple(mine) or nodes, waits_for
        )


@dataclass(slots=True)
class _Bounds:
    """By node, no later than when a request can start there; NaN where it never can."""

    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    seen: int = 0


class Starts:
    """When requests can start, remembered by shape: only nodes that changed are asked again."""

    def __init__(self, world: ClusterState) -> None:
        self._world = world
        self._bounds: OrderedDict[search.Key, _Bounds] = OrderedDict()

    def clear(self) -> None:
        self._bounds.clear()

    def first(
        self, request: Request, at: PlanTime, kept: BackfillPlanner, among: Mask | None = None
    ) -> BackfillSlot | None:
        """The earliest moment and, of equals, the first node by id; None where no end is known to make room.

        Where something is kept for others already, only what they leave is taken.
        """
        bounds = self.bounds(request, at)
        values = bounds.values.copy()
        if among is not None:
            values[~among] = nan
        while True:
            index = self._lowest(values)
            if index is None:
                return None
            node = self._world.node(index)
            start = start_on(node, request, at, kept.kept(index))
            if start is not None and start <= values[index]:
                return BackfillSlot(request, index, start, in_the_way(node, start, at))
            values[index] = nan if start is None else start
            if not kept.kept(index):
                bounds.values[index] = values[index]

    def _lowest(self, values: NDArray[np.float64]) -> int | None:
        finite = np.flatnonzero(values < inf)
        if not len(finite):
            return None
        lowest = finite[values[finite] == values[finite].min()]
        return min((int(index) for index in lowest), key=lambda index: self._world.node(index).id)

    def draining(self, request: Request, at: PlanTime, kept: BackfillPlanner) -> BackfillSlot | None:
        """The node with the least in the way, to be left to run empty where no declared end makes room."""
        values = self.bounds(request, at).values
        candidates = [
            (self._weight(node, at), node.id, int(index))
            for index in np.flatnonzero(values == inf)
            for node in [self._world.node(int(index))]
            if not kept.kept(int(index))
        ]
        for _weight, _id, index in sorted(candidates):
            node = self._world.node(index)
            if start_on(node, request, at) is not None:
                return BackfillSlot(request, index, inf, must_end(node, request, at))
        return None

    @staticmethod
    def _weight(node: NodeView, at: PlanTime) -> tuple[int, int]:
        endless = [each for each in node.running if expected_end(each, at) == inf]
        return sum(each.gpu_milli for each in endless), len(endless)

    # ---- what is remembered

    def bounds(self, request: Request, at: PlanTime) -> _Bounds:
        own = self._world.reserved_for(request.project_id)
        key = (*search.shape(request), owner_of(request), own, *search.choices(self._world, request))
        bounds = self._bounds.get(key)
        if bounds is None:
            bounds = self._bounds[key] = _Bounds()
            if len(self._bounds) > _MAX_SHAPES:
                self._bounds.popitem(last=False)
        self._bounds.move_to_end(key)
        self._update(bounds, request, at)
        return bounds

    def _update(self, bounds: _Bounds, request: Request, at: PlanTime) -> None:
        world = self._world
        if len(bounds.values) < len(world):
            bounds.values = np.concatenate([bounds.values, np.full(len(world) - len(bounds.values), nan)])
        asked_again = set(world.changes[bounds.seen :]) | world.with_holds
        # A moment that has passed is now, or was that of something which is stuck.
        asked_again.update(np.flatnonzero(bounds.values <= at.now + at.overhead_s).tolist())
        for index in asked_again:
            node = world.nodes[index]
            bounds.values[index] = nan if node is None else self._bound(index, node, request, at)
        bounds.seen = len(world.changes)

    def _bound(self, index: int, node: NodeView, request: Request, at: PlanTime) -> float:
        if node.state is not NodeState.READY or not admits(node, request):
            return nan
        if disk.unsuitable(request, node):
            return nan
        kind = int(self._world.kind_of[index])
        if len(self._world.kinds[kind].places) < request.gpu_count:
            return nan
        if request.gpu_count and not self._world.suitable(kind, request).models:
            return nan
        if request.mig_profile is not None or index in self._world.with_holds:
            return at.now
        return _bound(node, request, at)


def _bound(node: NodeView, request: Request, at: PlanTime) -> float:
    """No later than `start_on`, and nearly always equal: ends are counted, nothing is built."""
    cpu_milli, memory_mib = needs(request, node)
    cpu_lacks, memory_lacks = cpu_milli - node.cpu_milli_free, memory_mib - node.memory_mib_free
    disk_lacks = disk.lacking(request, node)
    free = {
        gpu.uuid: gpu.milli_free for gpu in node.gpus if gpu.healthy and gpu_offers.would_do(gpu, request)
    }
    if len(free) < request.gpu_count:
        return nan
    lacks = request.gpu_count - sum(milli >= request.gpu_milli for milli in free.values())
    if max(lacks, cpu_lacks, memory_lacks, disk_lacks) <= 0:
        return at.now
    for end, running in sorted(
        ((expected_end(each, at), each) for each in node.running), key=lambda ended: ended[0]
    ):
        cpu_lacks -= running.cpu_milli
        memory_lacks -= running.memory_mib
        disk_lacks -= running.disk_mib
        for grant in running.grants:
            if grant.gpu_uuid in free:
                before = free[grant.gpu_uuid]
                free[grant.gpu_uuid] = before + grant.milli
                lacks -= before < request.gpu_milli <= before + grant.milli
        if max(lacks, cpu_lacks, memory_lacks, disk_lacks) <= 0:
            return end
    return nan
