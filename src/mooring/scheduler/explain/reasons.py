"""Why one request waits, per node, and what would fit instead."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain import unplaced as cluster_wide
from mooring.scheduler.feasibility.filters import refusals
from mooring.scheduler.model import NodeView, Over, PlanTime, Refusal, Request, Unplaced
from mooring.scheduler.packing.search import find
from mooring_client.schemas.spec import WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class FittingAlternatives:
    """Changes to a request, each by itself, with which it would fit now."""

    max_count_now: int  # the most GPUs; 0 if not even one
    models_now: tuple[str, ...]  # NVML names of models that would fit
    share_milli_now: int | None = None  # the largest share of one GPU; null: none, or no share is requested
    without_same_numa: bool = False  # whether it would fit on GPUs of several NUMA nodes


def explain(nodes: Iterable[NodeView], request: Request, at: PlanTime) -> tuple[Refusal, ...]:
    """Every reason of every node that cannot host the request now, in order of node id."""
    by_id = sorted(nodes, key=lambda node: node.id)
    return tuple(refusal for node in by_id for refusal in refusals(node, request, at))


def unplaced(
    nodes: Sequence[NodeView], request: Request, at: PlanTime, cache: CycleCache | None = None
) -> Unplaced:
    """Explain why no node can host the request, with the refusals of each node."""
    cache = _updated(nodes, cache)
    explanation = cluster_wide.unplaced(cache.cluster, cache.node_groups, request, at)
    return replace(explanation, refusals=explain(nodes, request, at))


def over_quota(
    nodes: Sequence[NodeView], request: Request, at: PlanTime, cache: CycleCache | None = None
) -> Over | None:
    """The quota that an unplaced request waits for; None if something else keeps the request out."""
    cache = _updated(nodes, cache)
    return cluster_wide.over_quota(cache.cluster, cache.node_groups, request, at)


def would_fit(
    nodes: Sequence[NodeView], request: Request, at: PlanTime, cache: CycleCache | None = None
) -> FittingAlternatives:
    cluster = _updated(nodes, cache).cluster
    if not request.gpu_count:
        return FittingAlternatives(0, ())
    without_numa = replace(request, same_numa=False)
    return FittingAlternatives(
        _max_count(cluster, request, at),
        _fitting_models(cluster, request, at),
        _max_share(cluster, request, at),
        request.same_numa and not _fits(cluster, request, at) and _fits(cluster, without_numa, at),
    )


def _updated(nodes: Sequence[NodeView], cache: CycleCache | None) -> CycleCache:
    cache = cache or CycleCache()
    cache.update(nodes)
    return cache


def _fits(cluster: ClusterState, request: Request, at: PlanTime) -> bool:
    return find(cluster, request, at) is not None


def _max_count(cluster: ClusterState, request: Request, at: PlanTime) -> int:
    """The most GPUs that fit; a share is always of one GPU."""
    if _is_share(request):
        return int(_fits(cluster, request, at))
    most = max((len(kind.places) for kind in cluster.kinds), default=0)
    return _largest(most, lambda count: _fits(cluster, replace(request, gpu_count=count), at))


def _max_share(cluster: ClusterState, request: Request, at: PlanTime) -> int | None:
    if not _is_share(request):
        return None
    largest = _largest(WHOLE_MILLI - 1, lambda milli: _fits(cluster, replace(request, gpu_milli=milli), at))
    return largest or None


def _is_share(request: Request) -> bool:
    return request.gpu_milli < WHOLE_MILLI and request.mig_profile is None


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, if all smaller ones fit as well; 0 if none does."""
    return bisect_left(range(1, most + 1), 1, key=lambda number: int(not fits(number)))


def _fitting_models(cluster: ClusterState, request: Request, at: PlanTime) -> tuple[str, ...]:
    kinds = [cluster.kinds[number] for number in set(cluster.kind_of.tolist())]
    models = sorted({place.model for kind in kinds for place in kind.places})
    return tuple(model for model in models if _fits(cluster, replace(request, gpu_models=(model,)), at))
