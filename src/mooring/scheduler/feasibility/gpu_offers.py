"""Which cards of a node would do for a request, and which of them can be given now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.model import GpuAllocation, GpuView, MigView, NodeView, PlanTime, Request
from mooring.scheduler.packing import links


class GpuTraits(Protocol):
    """What never changes about a card."""

    @property
    def model(self) -> str: ...
    @property
    def memory_mib(self) -> int: ...
    @property
    def compute_capability(self) -> str | None: ...
    @property
    def mig_enabled(self) -> bool: ...
    @property
    def mig(self) -> tuple[MigView, ...]: ...


@dataclass(frozen=True, slots=True)
class Offer:
    """Cards of one model to choose from, of which there are enough; none for a request without GPUs."""

    rank: int  # of the model among those asked for, the preferred is 0
    model: str
    cards: tuple[GpuView, ...]
    there: tuple[GpuView, ...]  # all of the model that would do, in use or not


NO_GPUS = Offer(0, "", (), ())


def suitable(node: NodeView, request: Request) -> dict[str, list[GpuView]]:
    """The cards that would do, in use or not, by model: those given are all of one."""
    found: dict[str, list[GpuView]] = {}
    for gpu in node.gpus:
        if would_do(gpu, request):
            found.setdefault(gpu.model, []).append(gpu)
    return found


def would_do(gpu: GpuTraits, request: Request) -> bool:
    """Whether a card is what is asked for, whoever has it now."""
    return (
        preference(request, gpu.model) is not None
        and right_mode(gpu, request)
        and large_enough(gpu, request)
        and capable_enough(gpu, request)
    )


def right_mode(gpu: GpuTraits, request: Request) -> bool:
    """A card with MIG enabled is given out by its MIG devices and never itself."""
    if request.mig_profile is None:
        return not gpu.mig_enabled
    return gpu.mig_enabled and any(device.profile == request.mig_profile for device in gpu.mig)


def memory_of(gpu: GpuTraits, request: Request) -> int:
    """The memory (MiB) that a request sees: the card's, or the MIG device's."""
    return gpu.memory_mib if request.mig_profile is None else mig_memory_mib(request.mig_profile)


@lru_cache(maxsize=256)
def mig_memory_mib(profile: str) -> int:
    """What the profile's name tells: 10 GiB of `1g.10gb`; 0 where it tells nothing."""
    size = profile.partition(".")[2].partition("gb")[0]
    return int(size) * 1024 if size.isdigit() else 0


def large_enough(gpu: GpuTraits, request: Request) -> bool:
    return request.gpu_min_memory_mib is None or memory_of(gpu, request) >= request.gpu_min_memory_mib


def capable_enough(gpu: GpuTraits, request: Request) -> bool:
    """A card that does not tell its compute capability is not trusted to have it."""
    least = request.gpu_min_compute_capability
    return least is None or (
        gpu.compute_capability is not None and version(gpu.compute_capability) >= version(least)
    )


@lru_cache(maxsize=256)
def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def units(gpu: GpuView, request: Request, at: PlanTime) -> int:
    """How often the request's part of one card could be given from this one now."""
    return 0 if reserved(gpu, request, at) else unreserved_units(gpu, request)


def unreserved_units(gpu: GpuView, request: Request) -> int:
    """As `units`, were there no reservations."""
    return 0 if others_share(gpu, request) else unowned_units(gpu, request)


def unowned_units(gpu: GpuView, request: Request) -> int:
    """As `unreserved_units`, were the shares on the card its own project's."""
    if not gpu.healthy:
        return 0
    if request.mig_profile is not None:
        return sum(device.free and device.profile == request.mig_profile for device in gpu.mig)
    return gpu.milli_free // request.gpu_milli


def others_share(gpu: GpuView, request: Request) -> bool:
    """R12: shares of one card are all of one project. MIG devices are cards of their own in this."""
    if request.mig_profile is not None or gpu.free:
        return False
    return gpu.project_id != request.project_id


def reserved(gpu: GpuView, request: Request, at: PlanTime) -> bool:
    """Whether a reservation of another project begins before the request has gone, and has not ended yet."""
    return bool(gpu.holds) and any(
        hold.project_id != request.project_id and hold.from_at < at.end_of(request) and hold.to_at > at.now
        for hold in gpu.holds
    )


def own_reserved(gpu: GpuView, request: Request, at: PlanTime) -> bool:
    """Whether the card is held for the request's project right now."""
    return bool(gpu.holds) and any(
        hold.project_id == request.project_id and hold.from_at <= at.now < hold.to_at for hold in gpu.holds
    )


def offers(node: NodeView, request: Request, at: PlanTime) -> list[Offer]:
    """What there is enough of now, the preferred first: by model, and by NUMA node where it must be one."""
    if not request.gpu_count:
        return [NO_GPUS]
    found = [
        Offer(preference(request, model) or 0, model, cards, tuple(there))
        for model, there in suitable(node, request).items()
        for cards in neighbourhoods(usable(there, request, at), request)
        if enough(cards, request, at)
    ]
    return sorted(found, key=lambda offer: (offer.rank, offer.model, offer.cards[0].index))


def usable(cards: Iterable[GpuView], request: Request, at: PlanTime) -> list[GpuView]:
    """Those of which the request could be given something now."""
    return [gpu for gpu in cards if units(gpu, request, at)]


def neighbourhoods(cards: Sequence[GpuView], request: Request) -> list[tuple[GpuView, ...]]:
    """The sets of cards of which all that are given must come from one."""
    if not request.same_numa or request.gpu_count == 1:
        return [tuple(cards)] if cards else []
    # What does not tell where it is counts as near nothing.
    by_numa: dict[int, list[GpuView]] = {}
    for gpu in cards:
        if gpu.numa_node is not None:
            by_numa.setdefault(gpu.numa_node, []).append(gpu)
    return [tuple(there) for _numa, there in sorted(by_numa.items())]


def enough(usable: Sequence[GpuView], request: Request, at: PlanTime) -> bool:
    """Whether all that is asked for could be given from these, something from each."""
    if len(usable) >= request.gpu_count:
        return True
    return sum(units(gpu, request, at) for gpu in usable) >= request.gpu_count


def near_enough(node: NodeView, request: Request) -> bool:
    """Whether enough is free on one NUMA node, reservations aside, which depend on the moment."""
    return any(
        sum(unreserved_units(gpu, request) for gpu in there) >= request.gpu_count
        for of_model in suitable(node, request).values()
        for there in neighbourhoods(of_model, request)
    )


def grants(request: Request, offer: Offer, at: PlanTime, prefer: str = "") -> tuple[GpuAllocation, ...]:
    """What exactly is given: the best connected whole cards, the fullest card that has the share.

    Args:
        prefer: the UUID of the card of which a share is to be given.
    """
    if not request.gpu_count:
        return ()
    mine = [gpu for gpu in offer.cards if own_reserved(gpu, request, at)]
    cards: Sequence[GpuView] = mine if enough(mine, request, at) else offer.cards
    sound = [gpu for gpu in cards if not gpu.last]
    if len(sound) < len(cards) and enough(sound, request, at):
        cards = sound
    if request.mig_profile is not None:
        return _mig_grants(request, cards)
    if request.gpu_milli < WHOLE_MILLI:
        fullest = min(cards, key=lambda gpu: (gpu.uuid != prefer, gpu.milli_free, gpu.index, gpu.uuid))
        return (GpuAllocation(fullest.uuid, request.gpu_milli),)
    return tuple(GpuAllocation(uuid) for uuid in links.choose(cards, request.gpu_count, offer.there))


def _mig_grants(request: Request, cards: Iterable[GpuView]) -> tuple[GpuAllocation, ...]:
    """From the card with the fewest left, so that others keep what belongs together."""
    fullest = sorted(cards, key=lambda gpu: (gpu.last, unowned_units(gpu, request), gpu.index, gpu.uuid))
    free = (
        sorted(each.uuid for each in gpu.mig if each.free and each.profile == request.mig_profile)
        for gpu in fullest
    )
    devices = [
        GpuAllocation(gpu.uuid, request.gpu_milli, uuid)
        for gpu, uuids in zip(fullest, free, strict=True)
        for uuid in uuids
    ]
    return tuple(devices[: request.gpu_count])
