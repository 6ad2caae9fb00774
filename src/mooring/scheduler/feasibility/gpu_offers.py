"""Which GPUs of a node are suitable for a request, and which of them can be allocated now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooring.scheduler.feasibility.gpu_rules import passing
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.model import GpuAllocation, GpuView, NodeView, PlanTime, Request
from mooring.scheduler.packing import links
from mooring_client.schemas.spec import WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class Offer:
    """Enough usable GPUs of one model; none for a request without GPUs."""

    rank: int  # of the model in the request's order of preference, from 0
    model: str
    gpus: tuple[GpuView, ...]
    all_suitable: tuple[GpuView, ...]  # all suitable GPUs of the model, in use or not


NO_GPUS = Offer(0, "", (), ())


def suitable(node: NodeView, request: Request) -> dict[str, list[GpuView]]:
    """The suitable GPUs, in use or not, by model: an allocation has GPUs of one model."""
    found: dict[str, list[GpuView]] = {}
    for gpu in passing(node.gpus, request):
        found.setdefault(gpu.model, []).append(gpu)
    return found


def available(gpu: GpuView, request: Request, at: PlanTime) -> int:
    """How many of the requested shares, MIG devices or whole GPUs this GPU can provide now."""
    return 0 if gpu.reserved and reserved(gpu, request, at) else available_unreserved(gpu, request)


def available_unreserved(gpu: GpuView, request: Request) -> int:
    """As `available`, ignoring reservations."""
    return 0 if others_share(gpu, request) else available_unowned(gpu, request)


def available_unowned(gpu: GpuView, request: Request) -> int:
    """As `available_unreserved`, ignoring which project owns the shares on the GPU."""
    if not gpu.healthy:
        return 0
    if request.mig_profile is not None:
        return sum(device.free and device.profile == request.mig_profile for device in gpu.mig)
    return gpu.milli_free // request.gpu_milli


def others_share(gpu: GpuView, request: Request) -> bool:
    """R12: all shares of a GPU belong to one project. MIG devices are exempt: they are isolated."""
    if gpu.milli_free == WHOLE_MILLI or request.mig_profile is not None:
        return False
    return gpu.project_id != request.project_id


def reserved(gpu: GpuView, request: Request, at: PlanTime) -> bool:
    """Whether a reservation of another project overlaps the time from now to the end of the request."""
    return bool(gpu.reserved) and any(
        each.project_id != request.project_id and each.from_at < at.end_of(request) and each.to_at > at.now
        for each in gpu.reserved
    )


def own_reserved(gpu: GpuView, request: Request, at: PlanTime) -> bool:
    return bool(gpu.reserved) and any(
        each.project_id == request.project_id and each.from_at <= at.now < each.to_at for each in gpu.reserved
    )


def offers(node: NodeView, request: Request, at: PlanTime) -> list[Offer]:
    """The offers now, the preferred first: one per model, or per NUMA node if `same_numa` is set."""
    if not request.gpu_count:
        return [NO_GPUS]
    found = [
        Offer(preference(request, model) or 0, model, gpus, tuple(of_model))
        for model, of_model in suitable(node, request).items()
        for gpus in numa_groups(usable(of_model, request, at), request)
        if enough(gpus, request, at)
    ]
    return sorted(found, key=lambda offer: (offer.rank, offer.model, offer.gpus[0].index))


def usable(gpus: Iterable[GpuView], request: Request, at: PlanTime) -> list[GpuView]:
    return [gpu for gpu in gpus if available(gpu, request, at)]


def numa_groups(gpus: Sequence[GpuView], request: Request) -> list[tuple[GpuView, ...]]:
    """The sets of GPUs of which an allocation must use only one."""
    if not request.same_numa or request.gpu_count == 1:
        return [tuple(gpus)] if gpus else []
    # A GPU on an unknown NUMA node is in no set.
    by_numa: dict[int, list[GpuView]] = {}
    for gpu in gpus:
        if gpu.numa_node is not None:
            by_numa.setdefault(gpu.numa_node, []).append(gpu)
    return [tuple(group) for _numa, group in sorted(by_numa.items())]


def enough(usable: Sequence[GpuView], request: Request, at: PlanTime) -> bool:
    """Whether these GPUs together provide what is requested."""
    if len(usable) >= request.gpu_count:
        return True
    return sum(available(gpu, request, at) for gpu in usable) >= request.gpu_count


def near_enough(node: NodeView, request: Request) -> bool:
    """Whether one allocation could have enough, ignoring reservations, which depend on the time."""
    return any(
        sum(available_unreserved(gpu, request) for gpu in group) >= request.gpu_count
        for of_model in suitable(node, request).values()
        for group in numa_groups(of_model, request)
    )


def allocate(request: Request, offer: Offer, at: PlanTime, prefer: str = "") -> tuple[GpuAllocation, ...]:
    """Choose the best connected whole GPUs, the fullest GPU with room for the share, or MIG devices.

    GPUs reserved for the project come first if they suffice; GPUs marked `last` are used only if needed.

    Args:
        prefer: the UUID of the GPU to take a share from, if it is usable.
    """
    if not request.gpu_count:
        return ()
    own = [gpu for gpu in offer.gpus if own_reserved(gpu, request, at)]
    gpus: Sequence[GpuView] = own if enough(own, request, at) else offer.gpus
    sound = [gpu for gpu in gpus if not gpu.last]
    if len(sound) < len(gpus) and enough(sound, request, at):
        gpus = sound
    if request.mig_profile is not None:
        return _allocate_mig(request, gpus)
    if request.gpu_milli < WHOLE_MILLI:
        fullest = min(gpus, key=lambda gpu: (gpu.uuid != prefer, gpu.milli_free, gpu.index, gpu.uuid))
        return (GpuAllocation(fullest.uuid, request.gpu_milli),)
    return tuple(GpuAllocation(uuid) for uuid in links.choose(gpus, request.gpu_count, offer.all_suitable))


def _allocate_mig(request: Request, gpus: Iterable[GpuView]) -> tuple[GpuAllocation, ...]:
    """The GPUs with the fewest free devices come first, to avoid fragmentation; GPUs marked `last`, last."""
    fullest_first = sorted(
        gpus, key=lambda gpu: (gpu.last, available_unowned(gpu, request), gpu.index, gpu.uuid)
    )
    allocations = [
        GpuAllocation(gpu.uuid, request.gpu_milli, device.uuid)
        for gpu in fullest_first
        for device in sorted(gpu.mig, key=lambda device: device.uuid)
        if device.free and device.profile == request.mig_profile
    ]
    return tuple(allocations[: request.gpu_count])
