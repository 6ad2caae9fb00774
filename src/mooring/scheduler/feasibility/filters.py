"""The filters that a node must pass to host a request. Each failed filter yields its refusals."""

from collections.abc import Callable, Iterator, Sequence

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState
from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility import disk, gpu_offers, quotas
from mooring.scheduler.feasibility.needs import needs, preference
from mooring.scheduler.model import GpuView, NodeView, PlanTime, Refusal, Request

Filter = Callable[[NodeView, Request, PlanTime], Iterator[Refusal]]


def refusals(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Every reason why this node cannot host the request now; none if it can."""
    for each in FILTERS:
        yield from each(node, request, at)


def fits(node: NodeView, request: Request, at: PlanTime) -> bool:
    """Whether there is no refusal. Faster than `refusals`, which builds texts."""
    return bool(fitting_offers(node, request, at))


def fitting_offers(node: NodeView, request: Request, at: PlanTime) -> list[gpu_offers.Offer]:
    """The offers within the request's quota, the preferred first; empty if the node cannot host it."""
    if node.state is not NodeState.READY or not admits(node, request):
        return []
    cpu_milli, memory_mib = needs(request, node)
    if cpu_milli > node.cpu_milli_free or memory_mib > node.memory_mib_free:
        return []
    if not disk.fits(request, node):
        return []
    there = gpu_offers.offers(node, request, at)
    if request.quota is None:
        return there
    return [offer for offer in there if not quotas.over(request, offer.model, cpu_milli, memory_mib)]


def admits(node: NodeView, request: Request) -> bool:
    """Whether labels and node reservations let the request onto the node, however full it is.

    Each search over nodes in the scheduler checks this, or the masks of `search.admitting`.
    """
    return has_labels(node, request) and is_open_to(node, request.project_id)


def has_labels(node: NodeView, request: Request) -> bool:
    return all(node.labels.get(key) == value for key, value in request.selector.items())


def is_open_to(node: NodeView, project_id: str) -> bool:
    return node.reserved_for is None or project_id in node.reserved_for


def node_state(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    if node.state is not NodeState.READY:
        yield _refusal(node, f"node_{node.state}", NodeState.READY, node.state)


def node_selector(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    for key, value in sorted(request.selector.items()):
        if (label := node.labels.get(key)) != value:
            had = f"no label {key}" if label is None else f"{key}={label}"
            yield _refusal(node, "selector_mismatch", phrases.label(request, key, value), had)


def reserved_node(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Does not disclose the other projects."""
    if not is_open_to(node, request.project_id):
        yield _refusal(node, "node_reserved", "a node open to this project", "reserved for other projects")


def cpus(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    wanted, _ = needs(request, node)
    if wanted > node.cpu_milli_free:
        yield _refusal(node, "insufficient_cpu", phrases.cpus(wanted), phrases.cpus(node.cpu_milli_free))


def memory(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    _, wanted = needs(request, node)
    if wanted > node.memory_mib_free:
        yield _refusal(
            node, "insufficient_memory", phrases.memory(wanted), phrases.memory(node.memory_mib_free)
        )


def disk_space(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    wanted = phrases.memory(disk.needed(request, node))
    if request.disk_limits and not node.disk_enforced:
        yield _refusal(node, "disk_not_limited", "a node that enforces disk_mib", "no limits")
    if node.disk_pressure:
        yield _refusal(node, "disk_pressure", wanted, "a nearly full disk")
    if node.disk_mib is None and request.disk_mib is not None:
        yield _refusal(node, "insufficient_disk", wanted, "unknown: its agent does not report it")
    elif disk.lacking(request, node) > 0:
        yield _refusal(node, "insufficient_disk", wanted, phrases.memory(max(0, node.disk_mib_free)))


def gpu_model(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    if not request.gpu_count:
        return
    if not node.gpus:
        yield _refusal(node, "no_gpu", phrases.gpus(request), "no GPU")
    elif not _of_model(node, request):
        had = ", ".join(sorted({gpu.model for gpu in node.gpus}))
        yield _refusal(node, "gpu_model_mismatch", phrases.models(request), had)


def mig(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Passes if the node has no GPU of the model, as all later GPU filters do."""
    there = _of_model(node, request) if request.gpu_count else []
    if not there or _in_mode(there, request):
        return
    if request.mig_profile is None:
        yield _refusal(node, "gpu_has_mig_enabled", "a GPU without MIG", "MIG is enabled on all of them")
    else:
        profiles = sorted({device.profile for gpu in there if gpu.mig_enabled for device in gpu.mig})
        had = ", ".join(profiles) or "no MIG devices"
        yield _refusal(node, "no_such_mig_profile", request.mig_profile, had)


def gpu_memory(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    least = request.gpu_min_memory_mib
    there = _in_mode(_of_model(node, request), request) if request.gpu_count else []
    if least is None or not there:
        return
    largest = max(gpu_offers.memory_of(gpu, request) for gpu in there)
    if largest < least:
        yield _refusal(node, "insufficient_gpu_memory", phrases.memory(least), phrases.memory(largest))


def compute_capability(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Passes also if no GPU has enough memory."""
    least = request.gpu_min_compute_capability
    if least is None or not request.gpu_count:
        return
    there = [
        gpu for gpu in _in_mode(_of_model(node, request), request) if gpu_offers.large_enough(gpu, request)
    ]
    if there and not any(gpu_offers.capable_enough(gpu, request) for gpu in there):
        had = ", ".join(sorted({gpu.compute_capability or "unknown" for gpu in there}))
        yield _refusal(node, "insufficient_compute_capability", least, had)


def gpu_count(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Passes if no GPU of the node is suitable: the filters above refuse that."""
    suitable = gpu_offers.suitable(node, request) if request.gpu_count else {}
    if suitable and not gpu_offers.offers(node, request, at):
        groups = list(suitable.values())
        yield _refusal(node, *_lack_of_gpus(groups, request, at), phrases.gpu_counts(suitable, request, at))


def quota(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Passes if the node has too few free GPUs: the filters above refuse that."""
    if request.quota is None:
        return
    needed = needs(request, node)
    models = dict.fromkeys(offer.model for offer in gpu_offers.offers(node, request, at))
    overs = [quotas.over(request, model, *needed) for model in models]
    if overs and (first := overs[0]) and all(overs):
        yield _refusal(node, "quota", *phrases.over(first))


FILTERS: tuple[Filter, ...] = (
    node_state,
    node_selector,
    reserved_node,
    cpus,
    memory,
    disk_space,
    gpu_model,
    mig,
    gpu_memory,
    compute_capability,
    gpu_count,
    quota,
)


def _of_model(node: NodeView, request: Request) -> list[GpuView]:
    return [gpu for gpu in node.gpus if preference(request, gpu.model) is not None]


def _in_mode(gpus: Sequence[GpuView], request: Request) -> list[GpuView]:
    return [gpu for gpu in gpus if gpu_offers.right_mode(gpu, request)]


def _lack_of_gpus(groups: Sequence[Sequence[GpuView]], request: Request, at: PlanTime) -> tuple[str, str]:
    """The code and what was wanted. The code names the restriction without which one group would suffice."""
    wanted = phrases.gpus(request)
    count = request.gpu_count

    def enough(count_of: Callable[[GpuView], int]) -> bool:
        return any(sum(count_of(gpu) for gpu in group) >= count for group in groups)

    if enough(lambda gpu: gpu_offers.available(gpu, request, at)):
        return "gpus_not_on_one_numa_node", wanted
    if enough(lambda gpu: gpu_offers.available_unreserved(gpu, request)):
        return "gpu_reserved", wanted
    if request.mig_profile is not None:
        return "insufficient_mig_devices", wanted
    if request.gpu_milli == WHOLE_MILLI:
        return "insufficient_gpus", wanted
    if enough(lambda gpu: gpu_offers.available_unowned(gpu, request)):
        return "gpu_shared_by_other_project", wanted
    return "insufficient_gpu_share", wanted


def _refusal(node: NodeView, code: str, wanted: str, had: str) -> Refusal:
    return Refusal(node.id, node.name, code, str(wanted), str(had))
