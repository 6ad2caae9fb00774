"""Instance types, derived from the inventory: GPU model x count, and how many could start now."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from mooring.control.instances import placement_rules
from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.access import Access
from mooring.scheduler.feasibility import gpu_rules
from mooring.scheduler.feasibility.filters import is_open_to
from mooring.scheduler.model import GpuView, NodeView
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """Attributes: max_share_now: the largest free share of a GPU; null for several GPUs and MIG devices."""

    gpu_model: str
    gpu_memory_mib: int
    mig_profile: str | None
    gpu_count: int
    total: int
    available: int
    max_gpus_per_node_now: int
    max_share_now: float | None


DeviceType = tuple[str, int, str | None]  # GPU model, memory in MiB, MIG profile


@dataclass(slots=True)
class _Devices:
    """Devices of one type: how many are healthy and free on each node, and the largest free share of one."""

    healthy: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    largest_share: int = 0

    def of_count(self, device_type: DeviceType, count: int) -> InstanceShape:
        has_shares = count == 1 and device_type[2] is None
        return InstanceShape(
            *device_type,
            gpu_count=count,
            total=sum(healthy // count for healthy in self.healthy),
            available=sum(free // count for free in self.free),
            max_gpus_per_node_now=max(self.free),
            max_share_now=self.largest_share / WHOLE_MILLI if has_shares else None,
        )


def derive(session: Session, cache: SchedulerCache, access: Access) -> list[InstanceShape]:
    """The instance types that the caller can see.

    For each GPU model there is one type per power of two below the largest number of healthy GPUs on a node,
    and one for that number. For each MIG profile there is one.
    """
    types: dict[DeviceType, _Devices] = defaultdict(_Devices)
    selectors = placement_rules.selectors(session)
    for node in cache.nodes(session):
        usable = _is_usable(node, access, selectors)
        for device_type, (healthy, free, share) in _count(node, access, usable=usable).items():
            devices = types[device_type]
            devices.healthy.append(healthy)
            devices.free.append(free)
            devices.largest_share = max(devices.largest_share, share)
    return [
        types[each].of_count(each, count)
        for each in sorted(types, key=lambda each: (*each[:2], each[2] or ""))
        for count in (_counts(max(types[each].healthy)) if each[2] is None else (1,))
    ]


def _is_usable(node: NodeView, access: Access, selectors: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether the rules allow some project of the caller on the node, however full it is."""
    if access.caller.is_admin:
        return True
    own = [project_id for project_id in access.caller.permissions if access.caller.sees(project_id)]
    return any(
        is_open_to(node, project_id) and selectors.get(project_id, {}).items() <= node.labels.items()
        for project_id in own
    )


def _count(node: NodeView, access: Access, *, usable: bool) -> dict[DeviceType, tuple[int, int, int]]:
    """Device type -> healthy devices on the node, free ones, and the largest free share.

    Args:
        usable: as from `_is_usable`.
    """
    counts: dict[DeviceType, tuple[int, int, int]] = {}
    ready = usable and node.state is NodeState.READY
    for gpu in node.gpus:
        if gpu.healthy:
            for device_type, is_free, share in _devices(gpu, access):
                healthy, free, largest = counts.get(device_type, (0, 0, 0))
                largest = max(largest, share if ready else 0)
                counts[device_type] = healthy + 1, free + (is_free and ready), largest
    return counts


def _devices(gpu: GpuView, access: Access) -> Iterator[tuple[DeviceType, bool, int]]:
    """The devices that can be allocated of a GPU, whether each is free, and its free share in milli-GPUs."""
    if gpu.mig_enabled:
        for device in gpu.mig:
            memory_mib = gpu_rules.mig_memory_mib(device.profile)
            yield (gpu.model, memory_mib, device.profile), device.free, 0
    else:
        may_share = gpu.project_id is None or access.caller.sees(gpu.project_id)
        yield (gpu.model, gpu.memory_mib, None), gpu.free, gpu.milli_free if may_share else 0


def _counts(largest: int) -> Iterator[int]:
    count = 1
    while count < largest:
        yield count
        count *= 2
    yield largest
