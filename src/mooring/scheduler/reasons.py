"""Why a request waits, whether waiting can help, and what would fit instead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mooring.core.node import NodeState, allocatable_memory_mib
from mooring.scheduler import quotas, words
from mooring.scheduler.filters import fits, needs, offers, refusals, suitable_gpus, usable
from mooring.scheduler.model import NodeView, Over, Refusal, Request, Unplaced
from mooring.scheduler.summary import summarize


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What would fit now in the place of a request, everything else in it being the same."""

    max_count_now: int  # the most GPUs; 0 if not even one
    models_now: tuple[str, ...]  # NVML names of the models that could be asked for


def explain(nodes: Iterable[NodeView], request: Request) -> tuple[Refusal, ...]:
    """Every reason of every node that cannot host the request now, by the node's id."""
    by_id = sorted(nodes, key=lambda node: node.id)
    return tuple(refusal for node in by_id for refusal in refusals(node, request))


def would_fit(nodes: Iterable[NodeView], request: Request) -> Alternatives:
    world = tuple(nodes)
    return Alternatives(_most_gpus(world, request), _models(world, request))


def unplaced(nodes: Sequence[NodeView], emptied: Sequence[NodeView], request: Request) -> Unplaced:
    """Say why none of the nodes can host the request.

    Args:
        emptied: the same nodes without load and trouble, see `empty`.
    """
    refused = explain(nodes, request)
    unlimited = replace(request, quota=None)
    ever = any(fits(node, unlimited) for node in emptied)
    if over := over_quota(nodes, request):
        return Unplaced(request.instance_id, refused, ever, words.waits_for(over), over)
    if ever or not nodes:
        return Unplaced(request.instance_id, refused, ever, summarize(nodes, request, refused))
    because = summarize(emptied, unlimited, explain(emptied, unlimited), free="")
    return Unplaced(request.instance_id, refused, ever, f"no node could ever host this: {because}")


def over_quota(nodes: Iterable[NodeView], request: Request) -> Over | None:
    """The quota that an unplaced request waits for: it is kept from every node, or from one that it fits.

    Of a node that is full as well, the quota is no news: the wait is over when another node has room.
    """
    if request.quota is None:
        return None
    if anywhere := quotas.over_anywhere(request):
        return anywhere
    unlimited = replace(request, quota=None)
    fitting = [node for node in sorted(nodes, key=lambda node: node.id) if fits(node, unlimited)]
    overs = (
        quotas.over(request, model, *needs(request, node))
        for node in fitting
        for model in sorted(offers(node, request))
    )
    return next(filter(None, overs), None)


def empty(node: NodeView) -> NodeView:
    """The node as it would be if it were schedulable, nothing ran there, and all its GPUs were healthy."""
    return replace(
        node,
        state=NodeState.READY,
        cpu_milli_free=node.cpu_milli,
        memory_mib_free=allocatable_memory_mib(node.memory_mib),
        gpus=tuple(
            gpu if gpu.free and gpu.healthy else replace(gpu, free=True, healthy=True) for gpu in node.gpus
        ),
    )


def _most_gpus(nodes: Sequence[NodeView], request: Request) -> int:
    if not request.gpu_count:
        return 0
    most = max((_free_of_one_model(node, request) for node in nodes), default=0)
    counts = range(most, 0, -1)
    return next((count for count in counts if _any_fits(nodes, replace(request, gpu_count=count))), 0)


def _free_of_one_model(node: NodeView, request: Request) -> int:
    return max((len(usable(gpus)) for gpus in suitable_gpus(node, request).values()), default=0)


def _models(nodes: Sequence[NodeView], request: Request) -> tuple[str, ...]:
    if not request.gpu_count:
        return ()
    there = sorted({gpu.model for node in nodes for gpu in node.gpus})
    return tuple(model for model in there if _any_fits(nodes, replace(request, gpu_model=model)))


def _any_fits(nodes: Iterable[NodeView], request: Request) -> bool:
    return any(fits(node, request) for node in nodes)
