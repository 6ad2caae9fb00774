"""What can be asked for, derived from the inventory: GPU model x count, and how many could start now."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from mooring.control.instances import placement_rules
from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.access import Access
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState
from mooring.scheduler.feasibility import gpu_offers
from mooring.scheduler.feasibility.filters import is_open_to
from mooring.scheduler.model import GpuView, NodeView


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """Attributes: max_share_now: the largest part of one card that could start now; null but for one GPU."""

    gpu_model: str
    gpu_memory_mib: int
    mig_profile: str | None
    gpu_count: int
    total: int
    available: int
    max_gpus_per_node_now: int
    max_share_now: float | None


Kind = tuple[str, int, str | None]


@dataclass(slots=True)
class _Stock:
    """Of one kind: healthy ones and those that can be given out now, by node; the largest share of one."""

    healthy: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    largest_share: int = 0

    def of_count(self, kind: Kind, count: int) -> InstanceShape:
        return InstanceShape(
            *kind,
            gpu_count=count,
            total=sum(whole // count for whole in self.healthy),
            available=sum(now // count for now in self.free),
            max_gpus_per_node_now=max(self.free),
            max_share_now=self.largest_share / WHOLE_MILLI if count == 1 and kind[2] is None else None,
        )


def derive(session: Session, world: SchedulerCache, access: Access) -> list[InstanceShape]:
    """One entry for each model and each power of two up to its largest node, that size included, and one for
    each profile of MIG devices.
    """
    stocks: dict[Kind, _Stock] = defaultdict(_Stock)
    selectors = placement_rules.selectors(session)
    for node in world.nodes(session):
        usable = _is_usable(node, access, selectors)
        for kind, (whole, now, share) in _count(node, access, usable=usable).items():
            stock = stocks[kind]
            stock.healthy.append(whole)
            stock.free.append(now)
            stock.largest_share = max(stock.largest_share, share)
    return [
        stocks[kind].of_count(kind, count)
        for kind in sorted(stocks, key=lambda kind: (*kind[:2], kind[2] or ""))
        for count in (_counts(max(stocks[kind].healthy)) if kind[2] is None else (1,))
    ]


def _is_usable(node: NodeView, access: Access, selectors: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether some project that the caller is in may be placed there, however full it is."""
    if access.caller.is_admin:
        return True
    own = [project_id for project_id in access.caller.permissions if access.caller.sees(project_id)]
    return any(
        is_open_to(node, project_id) and selectors.get(project_id, {}).items() <= node.labels.items()
        for project_id in own
    )


def _count(node: NodeView, access: Access, *, usable: bool) -> dict[Kind, tuple[int, int, int]]:
    """Kind -> healthy ones on the node, those that can be given out now, and the largest free share.

    Args:
        usable: whether a project of the caller may be placed there at all.
    """
    counts: dict[Kind, tuple[int, int, int]] = {}
    ready = usable and node.state is NodeState.READY
    for gpu in node.gpus:
        if gpu.healthy:
            for kind, free, share in _units(gpu, access):
                whole, now, largest = counts.get(kind, (0, 0, 0))
                counts[kind] = whole + 1, now + (free and ready), max(largest, share if ready else 0)
    return counts


def _units(gpu: GpuView, access: Access) -> Iterator[tuple[Kind, bool, int]]:
    """What a card is given out as: whole and in shares, or by its MIG devices."""
    if gpu.mig_enabled:
        for device in gpu.mig:
            memory_mib = gpu_offers.mig_memory_mib(device.profile)
            yield (gpu.model, memory_mib, device.profile), device.free, 0
    else:
        mine = gpu.project_id is None or access.caller.sees(gpu.project_id)
        yield (gpu.model, gpu.memory_mib, None), gpu.free, gpu.milli_free if mine else 0


def _counts(largest: int) -> Iterator[int]:
    count = 1
    while count < largest:
        yield count
        count *= 2
    yield largest
