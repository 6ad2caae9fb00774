"""Which of the nodes that fit is the best: the one where the least is left over."""

from dataclasses import dataclass, field

from mooring.scheduler import quotas
from mooring.scheduler.filters import fits, needs, offers
from mooring.scheduler.links import choose
from mooring.scheduler.model import GpuView, NodeView, Placement, Request

Score = tuple[int, int, float]


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One node for one request; the lowest is the best, and ties break by the node's id."""

    score: Score
    node_id: str
    model: str  # of the GPUs to give; empty for none
    node: NodeView = field(compare=False)


def candidate(node: NodeView, request: Request) -> Candidate | None:
    """This node's best offer, or None where it does not fit."""
    if not fits(node, request):
        return None
    if not request.gpu_count:
        return Candidate(_score_without_gpus(node, request), node.id, "", node)
    return min(
        Candidate(_score_with_gpus(node, request, gpus), node.id, model, node)
        for model, gpus in offers(node, request).items()
        if not quotas.over(request, model, *needs(request, node))
    )


def within_quota(chosen: Candidate, request: Request) -> bool:
    """Whether the request's quota, which may have shrunk since, still leaves room for this offer."""
    return not quotas.over(request, chosen.model, *needs(request, chosen.node))


def placement(chosen: Candidate, request: Request) -> Placement:
    """What exactly the request is given there."""
    cpu_milli, memory_mib = needs(request, chosen.node)
    uuids: tuple[str, ...] = ()
    if request.gpu_count:
        uuids = choose(offers(chosen.node, request)[chosen.model], request.gpu_count)
    return Placement(request.instance_id, chosen.node_id, uuids, cpu_milli, memory_mib)


def _score_with_gpus(node: NodeView, request: Request, gpus: list[GpuView]) -> Score:
    """Fewest GPUs left over; then the smallest that do, so that a large card is not spent on "any".

    The size comes before CPUs and memory because those are hardly ever equal, and would decide alone.
    """
    return len(gpus) - request.gpu_count, max(gpu.memory_mib for gpu in gpus), _left_over(node, request)


def _score_without_gpus(node: NodeView, request: Request) -> Score:
    """Nodes without GPUs; then those with the fewest free, whose CPUs no GPU is waiting for."""
    return int(bool(node.gpus)), sum(gpu.free and gpu.healthy for gpu in node.gpus), _left_over(node, request)


def _left_over(node: NodeView, request: Request) -> float:
    """The parts of the node's CPUs and of its memory that stay free, added up."""
    cpu_milli, memory_mib = needs(request, node)
    cpu_left = (node.cpu_milli_free - cpu_milli) / max(1, node.cpu_milli)
    return cpu_left + (node.memory_mib_free - memory_mib) / max(1, node.memory_mib)
