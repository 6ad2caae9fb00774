"""What never changes about nodes, held once for all that are alike, and what of it would do for a request."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import allocatable_memory_mib
from mooring.scheduler.feasibility import gpu_offers
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.model import GpuView, MigView, NodeView, Request
from mooring.scheduler.packing import links
from mooring.scheduler.packing.shapes import FleetNode, NodeClass

# What of a node is given out as one: a card, or a MIG device on one.
Unit = tuple[GpuView, MigView | None]
Ask = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a node for a request's GPU; `key` is its model as the fleet knows it."""

    key: str
    model: str
    memory_mib: int
    compute_capability: str | None
    mig: tuple[MigView, ...]  # the one that the place is; none: it is a card

    @property
    def mig_enabled(self) -> bool:
        return bool(self.mig)


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A class of nodes. `cards` counts those with MIG enabled once, `places` has their devices."""

    cpu_milli: int
    memory_mib: int
    cards: int
    places: tuple[Place, ...]

    @property
    def as_class(self) -> NodeClass:
        keys = tuple(place.key for place in self.places)
        return NodeClass(self.cpu_milli, self.memory_mib, keys, tuple(map(_size, self.places)))

    @property
    def plain(self) -> bool:
        """Whether places are cards: only then does the fleet know a fair share itself."""
        return len(self.places) == self.cards


@dataclass(frozen=True, slots=True)
class Suitable:
    """The places of a kind that would do for a request: the models by preference, and which will not do."""

    models: tuple[tuple[int, str], ...]  # rank and key
    unsuitable: tuple[int, ...]  # places of a model that has others that would do


def units(node: NodeView) -> Iterator[Unit]:
    """All places, in an order that does not depend on the one in which they are told."""
    for gpu in links.in_order(node.gpus):
        if not gpu.mig_enabled:
            yield gpu, None
        else:
            for device in sorted(gpu.mig, key=lambda device: device.uuid):
                yield gpu, device


def kind_of(node: NodeView, there: list[Unit]) -> NodeKind:
    places = tuple(
        _place(gpu.model, gpu.memory_mib, gpu.compute_capability, device.profile if device else None)
        for gpu, device in there
    )
    return NodeKind(node.cpu_milli, allocatable_memory_mib(node.memory_mib), len(node.gpus), places)


@lru_cache(maxsize=4096)
def _place(model: str, memory_mib: int, compute_capability: str | None, profile: str | None) -> Place:
    # No model's name has a line break in it. Whichever device it is makes no other kind.
    key = model if profile is None else f"{profile}\n{model}"
    mig = () if profile is None else (MigView("", profile, free=True),)
    return Place(key, model, memory_mib, compute_capability, mig)


def _size(place: Place) -> int:
    """By memory, in GiB (drivers hide a few MiB, and not always the same), then by compute capability."""
    memory_mib = gpu_offers.mig_memory_mib(place.mig[0].profile) if place.mig else place.memory_mib
    major, minor = (*gpu_offers.version(place.compute_capability or ""), 0, 0)[:2]
    return (round(memory_mib / 1024) * 100 + major) * 100 + minor


def fleet_node(node: NodeView, as_class: NodeClass, there: list[Unit], *, open_: bool) -> FleetNode:
    """Args: open_: whether anything may be placed there at all."""
    if not open_:
        return FleetNode(node.id, as_class, -1, -1, (0,) * len(there))
    rests = tuple(_rest(gpu, device) for gpu, device in there)
    owners = tuple(
        gpu.project_id or "" if device is None and 0 < gpu.milli_free < WHOLE_MILLI else ""
        for gpu, device in there
    )
    return FleetNode(
        node.id, as_class, node.cpu_milli_free, node.memory_mib_free, rests, owners if any(owners) else ()
    )


def _rest(gpu: GpuView, device: MigView | None) -> int:
    if not gpu.healthy:
        return 0
    return gpu.milli_free if device is None else WHOLE_MILLI * device.free


def ask_of(request: Request) -> Ask:
    """All that decides which places would do."""
    return (
        request.gpu_models,
        request.gpu_min_memory_mib,
        request.gpu_min_compute_capability,
        request.mig_profile,
    )


def owner_of(request: Request) -> str:
    """The project, where it decides which cards would do: shares of one card are all of one project."""
    return request.project_id if request.gpu_milli < WHOLE_MILLI else ""


def suitable(kind: NodeKind, request: Request) -> Suitable:
    ranks: dict[str, int] = {}
    bad = []
    for number, place in enumerate(kind.places):
        rank = preference(request, place.model)
        if rank is not None and gpu_offers.would_do(place, request):
            ranks[place.key] = rank
        else:
            bad.append(number)
    unsuitable = tuple(number for number in bad if kind.places[number].key in ranks)
    return Suitable(tuple(sorted((rank, key) for key, rank in ranks.items())), unsuitable)
