"""How many instances of common sizes still fit, and which free GPUs or parts of GPUs are unusable.

Instances are assumed to need the default CPUs and memory: the share that goes with their GPUs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from mooring.core.disk import default_disk_mib
from mooring.core.node import proportional
from mooring.scheduler.model import GpuView, NodeView, PlanTime
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI

SIZES = (1, 2, 4, 8)  # GPUs per instance
SHARES_MILLI = (250, 500)

Stranding = Literal[
    "node_cordoned",
    "node_draining",
    "node_not_ready",
    "node_unreachable",
    "quarantined",
    "reserved",
    "disk_pressure",
    "shared_rest",
    "no_cpu_left",
    "no_memory_left",
    "no_disk_left",
]
_OF_STATE: dict[NodeState, Stranding] = {
    NodeState.CORDONED: "node_cordoned",
    NodeState.DRAINING: "node_draining",
    NodeState.NOT_READY: "node_not_ready",
    NodeState.UNREACHABLE: "node_unreachable",
}


@dataclass(frozen=True, slots=True)
class ModelFragmentation:
    """The GPUs of one model. Those with MIG enabled count only in `mig_free`."""

    gpus: int
    gpus_free: int  # whole GPUs that are not allocated, usable or not
    gpu_milli_free: int  # those and the free parts of shared GPUs
    fits: Mapping[int, int]  # GPUs per instance -> how many such instances fit now
    shares_fit: Mapping[int, int]  # thousandths of a GPU -> how many such shares fit on unallocated GPUs
    stranded_milli: Mapping[Stranding, int]  # free, but not available to every request
    mig_free: Mapping[str, int]  # profile -> available MIG devices


def fragmentation(nodes: Iterable[NodeView], at: PlanTime) -> dict[str, ModelFragmentation]:
    """The figures by model (NVML name)."""
    of_models: dict[str, list[tuple[NodeView, list[GpuView]]]] = {}
    for node in nodes:
        by_model: dict[str, list[GpuView]] = {}
        for gpu in node.gpus:
            by_model.setdefault(gpu.model, []).append(gpu)
        for model, gpus in by_model.items():
            of_models.setdefault(model, []).append((node, gpus))
    return {model: _of_model(nodes, at) for model, nodes in sorted(of_models.items())}


def _of_model(nodes: list[tuple[NodeView, list[GpuView]]], at: PlanTime) -> ModelFragmentation:
    all_plain = [gpu for _node, gpus in nodes for gpu in gpus if not gpu.mig_enabled]
    fits: Counter[int] = Counter(dict.fromkeys(SIZES, 0))
    shares: Counter[int] = Counter(dict.fromkeys(SHARES_MILLI, 0))
    stranded: Counter[Stranding] = Counter()
    mig: Counter[str] = Counter()
    for node, gpus in nodes:
        plain = [gpu for gpu in gpus if not gpu.mig_enabled]
        available = [gpu for gpu in plain if gpu.free and _closed(node, gpu, at) is None]
        for size in SIZES:
            fits[size] += min(len(available) // size, *_limits(node, size * WHOLE_MILLI).values())
        for milli in SHARES_MILLI:
            shares[milli] += min(len(available) * (WHOLE_MILLI // milli), *_limits(node, milli).values())
        for reason, milli in _stranded(node, plain, available, at):
            stranded[reason] += milli
        mig.update(_mig_free(node, gpus, at))
    return ModelFragmentation(
        gpus=len(all_plain),
        gpus_free=sum(gpu.free for gpu in all_plain),
        gpu_milli_free=sum(gpu.milli_free for gpu in all_plain),
        fits=dict(fits),
        shares_fit=dict(shares),
        stranded_milli=dict(stranded),
        mig_free=dict(mig),
    )


def _closed(node: NodeView, gpu: GpuView, at: PlanTime) -> Stranding | None:
    """Why no part of the GPU can be allocated; None if it can."""
    if node.state is not NodeState.READY:
        return _OF_STATE[node.state]
    if not gpu.healthy:
        return "quarantined"
    if node.disk_pressure:
        return "disk_pressure"
    if node.reserved_for is not None:
        return "reserved"
    reserved = any(period.from_at <= at.now < period.to_at for period in gpu.reserved)
    return "reserved" if reserved else None


def _stranded(
    node: NodeView, gpus: list[GpuView], available: list[GpuView], at: PlanTime
) -> Iterator[tuple[Stranding, int]]:
    """Reasons and amounts (milli); of GPUs without CPUs, memory or disk, only the scarcest is named."""
    for gpu in gpus:
        if gpu.milli_free and (reason := _closed(node, gpu, at)):
            yield reason, gpu.milli_free
        elif 0 < gpu.milli_free < WHOLE_MILLI:
            yield "shared_rest", gpu.milli_free
    reason, limit = min(_limits(node, WHOLE_MILLI).items(), key=itemgetter(1))
    if (stranded_gpus := len(available) - limit) > 0:
        yield reason, stranded_gpus * WHOLE_MILLI


def _limits(node: NodeView, milli: int) -> dict[Stranding, int]:
    """How many instances of this size the node has CPUs, memory and disk for, by what is used up then."""
    return {
        "no_cpu_left": _how_often(node.cpu_milli_free, node.cpu_milli, milli, node),
        "no_memory_left": _how_often(node.memory_mib_free, node.allocatable_mib, milli, node),
        "no_disk_left": _fit_disk(node),
    }


def _fit_disk(node: NodeView) -> int:
    """How many instances with the default disk. A node that does not report its disk sets no limit."""
    if node.disk_mib is None:
        return len(node.gpus) * WHOLE_MILLI
    return max(0, node.disk_mib_free) // max(1, default_disk_mib(node.disk_mib))


def _how_often(free: int, total: int, milli: int, node: NodeView) -> int:
    node_milli = len(node.gpus) * WHOLE_MILLI
    return max(0, free) // max(1, proportional(total, min(milli, node_milli), node_milli))


def _mig_free(node: NodeView, gpus: list[GpuView], at: PlanTime) -> Counter[str]:
    return Counter(
        device.profile
        for gpu in gpus
        if gpu.mig_enabled and _closed(node, gpu, at) is None
        for device in gpu.mig
        if device.free
    )
