"""What a node must have to host a request: one function per rule, and every rule that is broken is told."""

from collections.abc import Callable, Iterator

from mooring.core.node import NodeState, allocatable_memory_mib, fair_share
from mooring.scheduler import quotas, words
from mooring.scheduler.model import GpuView, NodeView, Refusal, Request
from mooring.scheduler.needs import fixed, matches

Filter = Callable[[NodeView, Request], Iterator[Refusal]]


def refusals(node: NodeView, request: Request) -> Iterator[Refusal]:
    """Every reason why this node cannot host the request now; none if it can."""
    for rule in FILTERS:
        yield from rule(node, request)


def fits(node: NodeView, request: Request) -> bool:
    return next(refusals(node, request), None) is None


def needs(request: Request, node: NodeView) -> tuple[int, int]:
    """The CPUs (milli) and memory (MiB) that the request takes on this node.

    What it leaves open is the share that goes with its GPUs. GPUs that the node does not have bring no
    share: they are refused as GPUs, and would otherwise be refused a second time as CPUs.
    """
    cpu_milli, memory_mib = fixed(request)
    if cpu_milli is None:
        cpu_milli = _share(node.cpu_milli, request, node)
    if memory_mib is None:
        memory_mib = _share(allocatable_memory_mib(node.memory_mib), request, node)
    return cpu_milli, memory_mib


def suitable_gpus(node: NodeView, request: Request) -> dict[str, list[GpuView]]:
    """The node's GPUs of a model and size asked for, in use or not, by model: GPUs given are all of one."""
    suitable: dict[str, list[GpuView]] = {}
    least = request.gpu_min_memory_mib or 0
    for gpu in node.gpus:
        if gpu.memory_mib >= least and matches(request.gpu_model, gpu.model):
            suitable.setdefault(gpu.model, []).append(gpu)
    return suitable


def offers(node: NodeView, request: Request) -> dict[str, list[GpuView]]:
    """The GPUs to choose from, by model, where there are enough; without GPUs one offer, of no model."""
    if not request.gpu_count:
        return {"": []}
    there = {model: usable(gpus) for model, gpus in suitable_gpus(node, request).items()}
    return {model: gpus for model, gpus in there.items() if len(gpus) >= request.gpu_count}


def usable(gpus: list[GpuView]) -> list[GpuView]:
    """Those that can be given out now."""
    return [gpu for gpu in gpus if gpu.free and gpu.healthy]


def node_state(node: NodeView, request: Request) -> Iterator[Refusal]:
    if node.state is not NodeState.READY:
        yield _refusal(node, f"node_{node.state}", NodeState.READY, node.state)


def node_selector(node: NodeView, request: Request) -> Iterator[Refusal]:
    for key, value in sorted(request.node_selector.items()):
        if (label := node.labels.get(key)) != value:
            had = f"no label {key}" if label is None else f"{key}={label}"
            yield _refusal(node, "selector_mismatch", f"{key}={value}", had)


def cpus(node: NodeView, request: Request) -> Iterator[Refusal]:
    wanted, _ = needs(request, node)
    if wanted > node.cpu_milli_free:
        yield _refusal(node, "insufficient_cpu", words.cpus(wanted), words.cpus(node.cpu_milli_free))


def memory(node: NodeView, request: Request) -> Iterator[Refusal]:
    _, wanted = needs(request, node)
    if wanted > node.memory_mib_free:
        yield _refusal(node, "insufficient_memory", words.memory(wanted), words.memory(node.memory_mib_free))


def gpu_model(node: NodeView, request: Request) -> Iterator[Refusal]:
    if not request.gpu_count:
        return
    if not node.gpus:
        yield _refusal(node, "no_gpu", words.gpus(request), "no GPU")
    elif request.gpu_model is not None and not _of_model(node, request):
        had = ", ".join(sorted({gpu.model for gpu in node.gpus}))
        yield _refusal(node, "gpu_model_mismatch", request.gpu_model, had)


def gpu_memory(node: NodeView, request: Request) -> Iterator[Refusal]:
    """Silent where the node has no GPU of the model, which `gpu_model` has said."""
    least = request.gpu_min_memory_mib
    if not request.gpu_count or least is None:
        return
    largest = max((gpu.memory_mib for gpu in _of_model(node, request)), default=None)
    if largest is not None and largest < least:
        yield _refusal(node, "insufficient_gpu_memory", words.memory(least), words.memory(largest))


def gpu_count(node: NodeView, request: Request) -> Iterator[Refusal]:
    """Silent where no GPU of the node is suitable at all, which the two rules above have said."""
    if not request.gpu_count:
        return
    suitable = suitable_gpus(node, request)
    if suitable and max(len(usable(gpus)) for gpus in suitable.values()) < request.gpu_count:
        yield _refusal(node, "insufficient_gpus", words.gpus(request), _best_stock(suitable))


def quota(node: NodeView, request: Request) -> Iterator[Refusal]:
    """Silent where the node has no GPUs to give, which the rules above have said."""
    if request.quota is None:
        return
    overs = [quotas.over(request, model, *needs(request, node)) for model in sorted(offers(node, request))]
    if overs and (first := overs[0]) and all(overs):
        yield _refusal(node, "quota", *words.over(first))


FILTERS: tuple[Filter, ...] = (
    node_state,
    node_selector,
    cpus,
    memory,
    gpu_model,
    gpu_memory,
    gpu_count,
    quota,
)


def _share(total: int, request: Request, node: NodeView) -> int:
    there = len(node.gpus)
    return fair_share(total, min(request.gpu_count, there), there) if there else 0


def _of_model(node: NodeView, request: Request) -> list[GpuView]:
    return [gpu for gpu in node.gpus if matches(request.gpu_model, gpu.model)]


def _best_stock(suitable: dict[str, list[GpuView]]) -> str:
    """`1 free of 8 (6 in use, 1 quarantined)`, of the model with the most free; named if there are others."""
    model, gpus = min(suitable.items(), key=lambda item: (-len(usable(item[1])), -len(item[1]), item[0]))
    in_use = sum(not gpu.free for gpu in gpus)
    quarantined = sum(gpu.free and not gpu.healthy for gpu in gpus)
    name = f" {model}" if len(suitable) > 1 else ""
    parts = [f"{count} {word}" for count, word in ((in_use, "in use"), (quarantined, "quarantined")) if count]
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"{len(usable(gpus))} free of {len(gpus)}{name}{detail}"


def _refusal(node: NodeView, code: str, wanted: str, had: str) -> Refusal:
    return Refusal(node.id, node.name, code, str(wanted), str(had))
