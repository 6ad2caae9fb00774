"""What can be asked for, derived from the inventory: GPU model x count, and how many could start now."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy.orm import Session

from mooring.control import placement
from mooring.core.node import NodeState
from mooring.scheduler.model import NodeView


@dataclass(frozen=True, slots=True)
class InstanceType:
    gpu_model: str
    gpu_memory_mib: int
    gpu_count: int
    total: int
    available: int
    max_gpus_per_node_now: int


Kind = tuple[str, int]


def derive(session: Session) -> list[InstanceType]:
    """One entry for each model and each power of two up to its largest node, that size included."""
    healthy: dict[Kind, list[int]] = defaultdict(list)
    free: dict[Kind, list[int]] = defaultdict(list)
    for node in placement.node_views(session):
        for kind, (whole, now) in _count(node).items():
            healthy[kind].append(whole)
            free[kind].append(now)
    return [
        InstanceType(
            *kind,
            gpu_count=count,
            total=sum(whole // count for whole in healthy[kind]),
            available=sum(now // count for now in free[kind]),
            max_gpus_per_node_now=max(free[kind]),
        )
        for kind in sorted(healthy)
        for count in _counts(max(healthy[kind]))
    ]


def _count(node: NodeView) -> dict[Kind, tuple[int, int]]:
    """Kind -> healthy GPUs on the node, and those that can be given out now."""
    counts: dict[Kind, tuple[int, int]] = {}
    for gpu in node.gpus:
        if gpu.healthy:
            whole, now = counts.get((gpu.model, gpu.memory_mib), (0, 0))
            takes = gpu.free and node.state is NodeState.READY
            counts[gpu.model, gpu.memory_mib] = whole + 1, now + takes
    return counts


def _counts(largest: int) -> Iterator[int]:
    count = 1
    while count < largest:
        yield count
        count *= 2
    yield largest
