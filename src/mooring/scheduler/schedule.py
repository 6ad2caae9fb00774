"""The decision: the oldest request that fits goes where the least is left over, until none fits."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

from mooring.scheduler import quotas
from mooring.scheduler.model import NodeView, Placement, Plan, Request, Snapshot, Unplaced
from mooring.scheduler.reasons import empty, unplaced
from mooring.scheduler.scores import Candidate, candidate, placement, within_quota

Shape = tuple[object, ...]


def schedule(snapshot: Snapshot) -> Plan:
    """Place what fits, oldest first, each on what those before it have left.

    A request that does not fit blocks none behind it.
    """
    queue = sorted(snapshot.requests, key=lambda request: (request.queued_at, request.instance_id))
    run = _Run(snapshot, queue)
    placements = [placed for request in queue if (placed := run.place(request))]
    return Plan(tuple(placements), _unplaced(run, queue, placements))


def place_one(nodes: Iterable[NodeView], request: Request) -> Placement | None:
    """Where this request would go if it were the only one; None if it does not fit."""
    best = min(filter(None, (candidate(node, request) for node in nodes)), default=None)
    return placement(best, request) if best else None


def shape(request: Request) -> Shape:
    """All that decides where a request fits: requests of one shape fit alike."""
    return (
        request.gpu_count,
        request.gpu_model,
        request.gpu_min_memory_mib,
        request.cpu_milli,
        request.memory_mib,
        frozenset(request.node_selector.items()),
        request.project_id if request.quota else None,
    )


class _Run:
    """The world as it shrinks. A node is replaced when something is taken from it, never edited."""

    def __init__(self, snapshot: Snapshot, queue: Iterable[Request]) -> None:
        self.nodes = {node.id: node for node in sorted(snapshot.nodes, key=lambda node: node.id)}
        self._quotas = dict(snapshot.quotas)
        self._changed: list[str] = []
        self._waiting = Counter(shape(self.limited(request)) for request in queue)
        self._searches: dict[Shape, _Search] = {}

    def limited(self, request: Request) -> Request:
        """The request with what its project's quota is by now."""
        quota = self._quotas.get(request.project_id)
        return request if quota is request.quota else replace(request, quota=quota)

    def place(self, asked: Request) -> Placement | None:
        request = self.limited(asked)
        best = self._search(request).best(request, self.nodes, self._changed)
        if best is None:
            return None
        placed = placement(best, request)
        self._take(placed)
        if request.quota:
            self._quotas[request.project_id] = quotas.after(
                request.quota, request, best.model, placed.cpu_milli, placed.memory_mib
            )
        return placed

    def _search(self, request: Request) -> "_Search":
        key = shape(request)
        search = self._searches.pop(key, None) or _Search(self.nodes, len(self._changed), request)
        self._waiting[key] -= 1
        if self._waiting[key]:  # the last of its shape needs no memory: a queue may be all different
            self._searches[key] = search
        return search

    def _take(self, placed: Placement) -> None:
        self.nodes[placed.node_id] = _without(self.nodes[placed.node_id], placed)
        self._changed.append(placed.node_id)


class _Search:
    """The candidates for one shape of request, best first; a node is looked at again when it has changed."""

    def __init__(self, nodes: dict[str, NodeView], changes: int, request: Request) -> None:
        self._heap = list(filter(None, (candidate(node, request) for node in nodes.values())))
        heapify(self._heap)
        self._changes_seen = changes

    def best(self, request: Request, nodes: dict[str, NodeView], changed: list[str]) -> Candidate | None:
        """The best offer left for a request of this search's shape, whose quota may be another by now."""
        if not self._heap:
            return None  # nothing is given back during a run: what has failed once fails for all of its shape
        for node_id in dict.fromkeys(changed[self._changes_seen :]):
            self._offer(nodes[node_id], request)
        self._changes_seen = len(changed)
        while self._heap:
            first = self._heap[0]
            current = first.node is nodes[first.node_id]
            if current and within_quota(first, request):
                return first
            heappop(self._heap)
            if current:  # the quota leaves no room for this model any more; perhaps for another one there
                self._offer(first.node, request)
        return None

    def _offer(self, node: NodeView, request: Request) -> None:
        if offer := candidate(node, request):
            heappush(self._heap, offer)


def _without(node: NodeView, placed: Placement) -> NodeView:
    return replace(
        node,
        cpu_milli_free=node.cpu_milli_free - placed.cpu_milli,
        memory_mib_free=node.memory_mib_free - placed.memory_mib,
        gpus=tuple(replace(gpu, free=False) if gpu.uuid in placed.gpu_uuids else gpu for gpu in node.gpus),
    )


def _unplaced(run: _Run, queue: list[Request], placements: list[Placement]) -> tuple[Unplaced, ...]:
    """Told of the world after the run, which is the one users see; computed once for each shape."""
    placed_ids = {placed.instance_id for placed in placements}
    waiting = [run.limited(request) for request in queue if request.instance_id not in placed_ids]
    nodes = tuple(run.nodes.values())
    emptied = tuple(map(empty, nodes)) if waiting else ()
    told: dict[Shape, Unplaced] = {}
    for request in waiting:
        if (key := shape(request)) not in told:
            told[key] = unplaced(nodes, emptied, request)
    return tuple(replace(told[shape(request)], instance_id=request.instance_id) for request in waiting)
