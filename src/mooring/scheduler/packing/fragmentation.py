"""What still fits, and which free GPUs nobody can use: the cluster as one that asks for whole GPUs sees it.

An instance is thought to take the CPUs and memory that go with its GPUs, as one that leaves them open does.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mooring.core.disk import default_disk_mib
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState, allocatable_memory_mib, fair_share
from mooring.scheduler.model import GpuView, NodeView, PlanTime

SIZES = (1, 2, 4, 8)  # GPUs of one instance
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
class OfModel:
    """The cards of one model. Those with MIG enabled are in `mig` alone."""

    gpus: int
    gpus_free: int  # whole cards that nobody has, in whatever condition
    gpu_milli_free: int  # those, and what is left of shared ones
    fits: Mapping[int, int]  # GPUs of an instance -> how many such instances could be placed now, no others
    shares_fit: Mapping[int, int]  # thousandths of one GPU -> how many such shares
    stranded_milli: Mapping[Stranding, int]  # of what is free: what cannot be given to just anybody, and why
    mig_free: Mapping[str, int]  # profile -> MIG devices that could be given out


def fragmentation(nodes: Iterable[NodeView], at: PlanTime) -> dict[str, OfModel]:
    """By the model's NVML name."""
    of_models: dict[str, list[tuple[NodeView, list[GpuView]]]] = {}
    for node in nodes:
        by_model: dict[str, list[GpuView]] = {}
        for gpu in node.gpus:
            by_model.setdefault(gpu.model, []).append(gpu)
        for model, gpus in by_model.items():
            of_models.setdefault(model, []).append((node, gpus))
    return {model: _of_model(there, at) for model, there in sorted(of_models.items())}


def _of_model(there: list[tuple[NodeView, list[GpuView]]], at: PlanTime) -> OfModel:
    cards = [gpu for _node, gpus in there for gpu in gpus if not gpu.mig_enabled]
    fits: Counter[int] = Counter(dict.fromkeys(SIZES, 0))
    shares: Counter[int] = Counter(dict.fromkeys(SHARES_MILLI, 0))
    stranded: Counter[Stranding] = Counter()
    mig: Counter[str] = Counter()
    for node, gpus in there:
        plain = [gpu for gpu in gpus if not gpu.mig_enabled]
        open_ = [gpu for gpu in plain if gpu.free and _closed(node, gpu, at) is None]
        for size in SIZES:
            fits[size] += min(len(open_) // size, _beside(node, size * WHOLE_MILLI))
        for milli in SHARES_MILLI:
            shares[milli] += min(len(open_) * (WHOLE_MILLI // milli), _beside(node, milli))
        for reason, milli in _stranded(node, plain, open_, at):
            stranded[reason] += milli
        mig.update(_mig_free(node, gpus, at))
    return OfModel(
        gpus=len(cards),
        gpus_free=sum(gpu.free for gpu in cards),
        gpu_milli_free=sum(gpu.milli_free for gpu in cards),
        fits=dict(fits),
        shares_fit=dict(shares),
        stranded_milli=dict(stranded),
        mig_free=dict(mig),
    )


def _closed(node: NodeView, gpu: GpuView, at: PlanTime) -> Stranding | None:
    """Why nothing of the card can be given out, whatever is free of it."""
    if node.state is not NodeState.READY:
        return _OF_STATE[node.state]
    if not gpu.healthy:
        return "quarantined"
    if node.disk_pressure:
        return "disk_pressure"
    if node.reserved_for is not None:
        return "reserved"
    held = any(hold.from_at <= at.now < hold.to_at for hold in gpu.holds)
    return "reserved" if held else None


def _stranded(
    node: NodeView, gpus: list[GpuView], open_: list[GpuView], at: PlanTime
) -> Iterator[tuple[Stranding, int]]:
    for gpu in gpus:
        if gpu.milli_free and (reason := _closed(node, gpu, at)):
            yield reason, gpu.milli_free
        elif 0 < gpu.milli_free < WHOLE_MILLI:
            yield "shared_rest", gpu.milli_free
    rooms: list[tuple[int, Stranding]] = [
        (_by_cpu(node, WHOLE_MILLI), "no_cpu_left"),
        (_by_memory(node, WHOLE_MILLI), "no_memory_left"),
        (_by_disk(node), "no_disk_left"),
    ]
    room, reason = min(rooms, key=lambda each: each[0])
    if (without := len(open_) - room) > 0:
        yield reason, without * WHOLE_MILLI


def _beside(node: NodeView, milli: int) -> int:
    """For how many instances with so many GPUs the node has CPUs, memory and disk."""
    return min(_by_cpu(node, milli), _by_memory(node, milli), _by_disk(node))


def _by_cpu(node: NodeView, milli: int) -> int:
    return _times(node.cpu_milli_free, node.cpu_milli, milli, node)


def _by_memory(node: NodeView, milli: int) -> int:
    return _times(node.memory_mib_free, allocatable_memory_mib(node.memory_mib), milli, node)


def _by_disk(node: NodeView) -> int:
    """Of the default size. A node that does not report its disk has room for all of its GPUs' shares."""
    if node.disk_mib is None:
        return len(node.gpus) * WHOLE_MILLI
    return max(0, node.disk_mib_free) // max(1, default_disk_mib(node.disk_mib))


def _times(free: int, total: int, milli: int, node: NodeView) -> int:
    there = len(node.gpus) * WHOLE_MILLI
    return max(0, free) // max(1, fair_share(total, min(milli, there), there))


def _mig_free(node: NodeView, gpus: list[GpuView], at: PlanTime) -> Counter[str]:
    return Counter(
        device.profile
        for gpu in gpus
        if gpu.mig_enabled and _closed(node, gpu, at) is None
        for device in gpu.mig
        if device.free
    )
