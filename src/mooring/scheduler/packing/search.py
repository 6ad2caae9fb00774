"""Finds the best node for a request: the fleet selects the node, `NodeView` determines the exact GPUs.

The fleet covers counts, models, shares and owners; the node's state covers NUMA nodes and reserved GPUs.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooring.scheduler.cluster import ClusterState, Mask
from mooring.scheduler.feasibility import filters, gpu_offers, quotas
from mooring.scheduler.feasibility.filters import fitting_offers
from mooring.scheduler.feasibility.gpu_rules import gpu_key
from mooring.scheduler.feasibility.masks import both, passing
from mooring.scheduler.feasibility.needs import disk, fixed, needs, preference
from mooring.scheduler.model import GpuAllocation, GpuView, NodeView, Placement, PlanTime, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing import links, node_classes
from mooring.scheduler.packing.shapes import Move, Shape
from mooring_client.schemas.spec import WHOLE_MILLI

Key = tuple[object, ...]
# Whether a placement on the node with this index is allowed.
Allowed = Callable[[int, Placement], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """A placement, with the index of its node and the GPU model."""

    index: int
    model: str
    placement: Placement


def shape(request: Request) -> Key:
    """All that decides where a request fits, except its project and duration: see `key`."""
    return (
        request.gpu_count,
        request.gpu_milli,
        *gpu_key(request),
        request.same_numa,
        *[key_of(request) for key_of in filters.RULES.keys],
    )


def key(request: Request) -> Key:
    """All that decides where a request can be placed now: if one fails, all with the same key do.

    The project matters for its quota, reservations and shares; the duration for later reservations.
    """
    return (*shape(request), request.project_id, request.max_duration_s)


def find(
    cluster: ClusterState,
    request: Request,
    at: PlanTime,
    among: Mask | None = None,
    allowed: Allowed | None = None,
) -> Found | None:
    """The best placement; None if nothing fits.

    Args:
        among: the candidate nodes.
        allowed: may reject placements that fit, in favour of other pending requests.
    """
    if request.quota is not None and quotas.over_anywhere(request):
        return None
    search = _Search(cluster, request, at, among, allowed)
    return search.in_own_reservation() or search.best()


def fleet_shape_of(cluster: ClusterState, request: Request) -> Shape:
    """The shape of the request in the fleet, whatever its quota allows."""
    unlimited = request if request.quota is None else replace(request, quota=None)
    search = _Search(cluster, unlimited, PlanTime(0.0), None, None)
    models: frozenset[str] = frozenset().union(*search.tiers())
    everything = {place.key for kind in cluster.kinds for place in kind.places}
    return search.fleet_shape(frozenset() if models == everything else models)


def best_nodes(cluster: ClusterState, request: Request, count: int) -> list[int]:
    """Nodes that may have room for the request, best first; reservations and NUMA nodes are ignored."""
    search = _Search(cluster, request, PlanTime(0.0), None, None)
    moves = [
        move
        for models in search.tiers()
        for fleet_shape, nodes in search.variants(models)
        for move in cluster.fleet.ranked(fleet_shape, count, both(nodes, passing(cluster, request)))
    ]
    return list(dict.fromkeys(move.node for move in moves))[:count]


def choices(cluster: ClusterState, request: Request) -> Key:
    """The models and node kinds that the quota permits, as part of a cache key."""
    if request.quota is None:
        return ()
    search = _Search(cluster, request, PlanTime(0.0), None, None)
    return (request.project_id, *search.tiers(), search.kinds_within_quota())


class _Search:
    def __init__(
        self,
        cluster: ClusterState,
        request: Request,
        at: PlanTime,
        among: Mask | None,
        allowed: Allowed | None,
    ) -> None:
        self._cluster = cluster
        self._request = request
        self._at = at
        self._allowed = allowed
        self._suitable = cluster.suitable(request) if request.gpu_count else []
        self._among = both(both(among, passing(cluster, request)), _near_enough(cluster, request))

    def best(self) -> Found | None:
        return self._best(self._among, self._blocked())

    def _best(self, among: Mask | None, blocked: dict[int, tuple[int, ...]]) -> Found | None:
        """Uses the GPUs marked `last` only if nothing else fits."""
        last = self._last()
        without = dict(blocked)
        for index, places in last.items():
            without[index] = tuple(sorted({*blocked.get(index, ()), *places}))
        for unavailable in (without, blocked) if last else (blocked,):
            for keys in self.tiers():
                if found := self._best_of(keys, among, unavailable):
                    return found
        return None

    def _last(self) -> dict[int, list[int]]:
        """The places of the GPUs marked `last`, by node."""
        if not self._request.gpu_count:
            return {}
        nodes = {index: self._cluster.node(index) for index in self._cluster.with_last}
        return {
            index: [place for place, (gpu, _mig) in enumerate(node_classes.places_of(node)) if gpu.last]
            for index, node in nodes.items()
        }

    def in_own_reservation(self) -> Found | None:
        """The best placement on GPUs that are now reserved for the project, if one node has enough."""
        if not self._request.gpu_count or not self._cluster.with_reserved_gpus:
            return None
        blocked = {
            index: places
            for index in sorted(self._cluster.with_reserved_gpus)
            if (places := self._not_own(index)) is not None
        }
        if not blocked:
            return None
        mask = np.zeros(len(self._cluster), np.bool_)
        mask[list(blocked)] = True
        return self._best(mask if self._among is None else mask & self._among, blocked)

    def _not_own(self, index: int) -> tuple[int, ...] | None:
        """The places to block, so that only those reserved for the project are left; None if none is."""
        devices = node_classes.places_of(self._cluster.node(index))
        own = [gpu_offers.own_reserved(gpu, self._request, self._at) for gpu, _mig in devices]
        if not any(own):
            return None
        not_own = {place for place, is_own in enumerate(own) if not is_own}
        return tuple(sorted(not_own | {*self._unsuitable(index)}))

    def tiers(self) -> Iterator[frozenset[str]]:
        """Sets of equally preferred models, to be tried in this order."""
        if not self._request.gpu_count:
            yield frozenset()
            return
        ranks: dict[str, int] = {}
        for of_kind in self._suitable:
            for rank, model in of_kind.models:
                if self._within_quota(model):
                    ranks[model] = rank
        for rank in sorted(set(ranks.values())):
            yield frozenset(model for model, of_model in ranks.items() if of_model == rank)

    def _within_quota(self, model: str) -> bool:
        """For GPUs only: CPUs and memory may depend on the node, and are checked later."""
        name = model.rpartition("\n")[2]
        return self._request.quota is None or not quotas.over(self._request, name, 0, 0)

    def _unsuitable(self, index: int) -> tuple[int, ...]:
        return self._suitable[int(self._cluster.kind_of[index])].unsuitable

    def _blocked(self) -> dict[int, tuple[int, ...]]:
        """The places that are unsuitable or reserved for other projects, by node."""
        if not self._request.gpu_count:
            return {}
        unsuitable = {
            number: of_kind.unsuitable for number, of_kind in enumerate(self._suitable) if of_kind.unsuitable
        }
        numbers = self._cluster.kind_of.tolist() if unsuitable else ()
        blocked = {index: unsuitable[number] for index, number in enumerate(numbers) if number in unsuitable}
        for index in self._cluster.with_reserved_gpus:
            if reserved := self._reserved(index):
                blocked[index] = tuple(sorted({*blocked.get(index, ()), *reserved}))
        return blocked

    def _reserved(self, index: int) -> list[int]:
        """The places of GPUs that are reserved for other projects before the request would end."""
        devices = enumerate(node_classes.places_of(self._cluster.node(index)))
        return [place for place, (gpu, _mig) in devices if gpu_offers.reserved(gpu, self._request, self._at)]

    def _best_of(
        self, keys: frozenset[str], among: Mask | None, blocked: dict[int, tuple[int, ...]]
    ) -> Found | None:
        rejected: list[int] = []
        while True:
            moves = [
                move
                for fleet_shape, nodes in self.variants(keys)
                if (
                    move := self._cluster.fleet.best(
                        fleet_shape, _without(self._cluster, both(among, nodes), rejected), blocked
                    )
                )
            ]
            if not moves:
                return None
            best = max(moves, key=lambda move: (move.score, self._cluster.fleet.rank(move.node)))
            if found := self._on_node(best, blocked.get(best.node, ())):
                return found
            rejected.append(best.node)

    def fleet_shape(self, keys: frozenset[str]) -> Shape:
        request = self._request
        whole = request.mig_profile is not None or request.gpu_milli == WHOLE_MILLI
        return Shape(
            request.gpu_count,
            WHOLE_MILLI if whole else request.gpu_milli,
            *fixed(request),
            keys,
            "" if whole else request.project_id,
        )

    def variants(self, keys: frozenset[str]) -> list[tuple[Shape, Mask | None]]:
        """The request's shapes in the fleet, which cannot compute the default CPUs on nodes with MIG."""
        plain = self.fleet_shape(keys)
        cpu_milli, memory_mib = plain.cpu_milli, plain.memory_mib
        with_mig = [number for number, kind in enumerate(self._cluster.kinds) if not kind.plain]
        if not with_mig or (cpu_milli is not None and memory_mib is not None):
            return [(plain, self._nodes_within_quota())]
        kind_of = self._cluster.kind_of
        mask = both(~np.isin(kind_of, with_mig), self._nodes_within_quota())
        variants: list[tuple[Shape, Mask | None]] = [(plain, mask)]
        by_needs: dict[tuple[int, int], list[int]] = {}
        for number in with_mig:
            by_needs.setdefault(needs(self._request, self._cluster.kinds[number]), []).append(number)
        for kind_needs, numbers in sorted(by_needs.items()):
            mask = both(np.isin(kind_of, numbers), self._nodes_within_quota())
            variants.append((replace(plain, cpu_milli=kind_needs[0], memory_mib=kind_needs[1]), mask))
        return variants

    def _nodes_within_quota(self) -> Mask | None:
        """The nodes on which the default CPUs and memory are within the quota; None: all."""
        request = self._request
        if request.quota is None or None not in fixed(request):
            return None
        if not {quotas.CPUS, quotas.MEMORY} & request.quota.limits.keys():
            return None
        within = self.kinds_within_quota()
        return None if all(within) else np.array(within)[self._cluster.kind_of]

    def kinds_within_quota(self) -> tuple[bool, ...]:
        return tuple(
            not quotas.over(self._request, "", *needs(self._request, self._cluster.kinds[number]))
            for number in range(len(self._cluster.kinds))
        )

    def _on_node(self, move: Move, blocked: Collection[int]) -> Found | None:
        """The exact placement on the node, if the node and `allowed` permit one."""
        node = self._cluster.node(move.node)
        gpus = [gpu for gpu, _mig in node_classes.places_of(node)] if move.gpus else []
        first = gpus[move.gpus[0]] if gpus else None
        closed = {gpus[place].uuid for place in blocked} if gpus else set()
        for offer in self._offers(node, first):
            placed = placement(node, self._request, offer, self._at, first.uuid if first else "")
            if closed.isdisjoint(placed.gpu_uuids) and (
                self._allowed is None or self._allowed(move.node, placed)
            ):
                return Found(move.node, offer.model, placed)
        return None

    def _offers(self, node: NodeView, first: GpuView | None) -> list[gpu_offers.Offer]:
        """The offers of the node for the fleet's model, then for equally preferred models.

        The fleet only counts GPUs. Those of its model may be on several NUMA nodes, or reserved for others.
        """
        fitting = fitting_offers(node, self._request, self._at)
        if first is None:
            return fitting
        rank = preference(self._request, first.model)
        equally_preferred = (offer for offer in fitting if offer.rank == rank)
        return sorted(equally_preferred, key=lambda offer: offer.model != first.model)


def placement(
    node: NodeView, request: Request, offer: gpu_offers.Offer, at: PlanTime, prefer: str = ""
) -> Placement:
    """The exact placement of the request on this offer."""
    allocations = gpu_offers.allocate(request, offer, at, prefer)
    cpu_milli, memory_mib = needs(request, node)
    score = _link_score(node, offer.model, allocations)
    return Placement(
        request.instance_id, node.id, allocations, cpu_milli, memory_mib, score, disk_mib=disk(request, node)
    )


def with_request(node: NodeView, request: Request, at: PlanTime) -> NodeView | None:
    """The node with the request placed on its first offer; None if the request does not fit."""
    offers = fitting_offers(node, request, at)
    return with_placement(node, placement(node, request, offers[0], at), request, at) if offers else None


def _link_score(node: NodeView, model: str, allocations: Sequence[GpuAllocation]) -> float | None:
    if len(allocations) < 2 or allocations[0].mig_uuid is not None:
        return None
    of_model = [gpu for gpu in node.gpus if gpu.model == model and not gpu.mig_enabled]
    return links.score({allocation.gpu_uuid for allocation in allocations}, of_model)


def _near_enough(cluster: ClusterState, request: Request) -> Mask | None:
    if not request.same_numa or request.gpu_count < 2:
        return None
    mask_key = ("near enough", gpu_key(request), request.gpu_count)
    return cluster.mask(mask_key, lambda node: gpu_offers.near_enough(node, request))


def _without(cluster: ClusterState, among: Mask | None, rejected: list[int]) -> Mask | None:
    if not rejected:
        return among
    mask = np.ones(len(cluster), np.bool_) if among is None else among.copy()
    mask[rejected] = False
    return mask
