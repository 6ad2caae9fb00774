"""Node kinds: the fixed properties of nodes that rules read, while packing reads those of `NodeClass`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from mooring.scheduler.feasibility import gpu_rules
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.model import GpuView, MigView, NodeView, Request
from mooring.scheduler.packing import links
from mooring.scheduler.packing.shapes import FleetNode, NodeClass
from mooring_client.schemas.spec import WHOLE_MILLI

# What is allocated as one unit: a GPU, or a MIG device of one.
DeviceView = tuple[GpuView, MigView | None]


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU or MIG device of a node kind; `key` is its model in the fleet."""

    key: str
    model: str
    memory_mib: int
    compute_capability: str | None
    mig: tuple[MigView, ...]  # the MIG device; empty for a GPU

    @property
    def mig_enabled(self) -> bool:
        return bool(self.mig)


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes with equal hardware. A GPU with MIG enabled counts once; its MIG devices are in `places`."""

    cpu_milli: int
    allocatable_mib: int
    gpu_count: int
    places: tuple[Place, ...]

    @property
    def as_class(self) -> NodeClass:
        keys = tuple(place.key for place in self.places)
        return NodeClass(self.cpu_milli, self.allocatable_mib, keys, tuple(map(_size, self.places)))

    @property
    def plain(self) -> bool:
        """Whether no GPU has MIG enabled: only then can the fleet compute a fair share itself."""
        return len(self.places) == self.gpu_count


@dataclass(frozen=True, slots=True)
class Suitable:
    """The models of a node kind that have suitable places for a request, by preference."""

    models: tuple[tuple[int, str], ...]  # rank in the order of preference, `Place.key`
    unsuitable: tuple[int, ...]  # places whose model suits because of other places


def places_of(node: NodeView) -> Iterator[DeviceView]:
    """The devices by place, in an order that does not depend on that in which the node reports them."""
    for gpu in links.in_order(node.gpus):
        if not gpu.mig_enabled:
            yield gpu, None
        else:
            for device in sorted(gpu.mig, key=lambda device: device.uuid):
                yield gpu, device


def kind_of(node: NodeView, devices: list[DeviceView]) -> NodeKind:
    places = tuple(
        _place(gpu.model, gpu.memory_mib, gpu.compute_capability, device.profile if device else None)
        for gpu, device in devices
    )
    return NodeKind(node.cpu_milli, node.allocatable_mib, node.gpu_count, places)


@lru_cache(maxsize=4096)
def _place(model: str, memory_mib: int, compute_capability: str | None, profile: str | None) -> Place:
    # No model name contains a line break. UUIDs are left out, so that nodes with equal MIG devices are equal.
    key = model if profile is None else f"{profile}\n{model}"
    mig = () if profile is None else (MigView("", profile, free=True),)
    return Place(key, model, memory_mib, compute_capability, mig)


def _size(place: Place) -> int:
    """A number that orders by memory in GiB (drivers hide a few MiB), then by compute capability."""
    memory_mib = gpu_rules.mig_memory_mib(place.mig[0].profile) if place.mig else place.memory_mib
    major, minor = (*gpu_rules.version(place.compute_capability or ""), 0, 0)[:2]
    return (round(memory_mib / 1024) * 100 + major) * 100 + minor


def fleet_node(node: NodeView, as_class: NodeClass, places: list[DeviceView], *, open_: bool) -> FleetNode:
    """Args: open_: whether the node accepts placements."""
    if not open_:
        return FleetNode(node.id, as_class, -1, -1, (0,) * len(places))
    gpu_free = tuple(_milli_free(gpu, device) for gpu, device in places)
    owners = tuple(
        gpu.project_id or "" if device is None and 0 < gpu.milli_free < WHOLE_MILLI else ""
        for gpu, device in places
    )
    return FleetNode(
        node.id, as_class, node.cpu_milli_free, node.memory_mib_free, gpu_free, owners if any(owners) else ()
    )


def _milli_free(gpu: GpuView, device: MigView | None) -> int:
    if not gpu.healthy:
        return 0
    return gpu.milli_free if device is None else WHOLE_MILLI * device.free


def owner_of(request: Request) -> str:
    """The project of a share, since all shares of a GPU belong to one project; otherwise empty."""
    return request.project_id if request.gpu_milli < WHOLE_MILLI else ""


def suitable(kind: NodeKind, request: Request) -> Suitable:
    suited = set(gpu_rules.passing(kind.places, request))
    ranks = {place.key: preference(request, place.model) or 0 for place in suited}
    unsuitable = tuple(
        number for number, place in enumerate(kind.places) if place.key in ranks and place not in suited
    )
    return Suitable(tuple(sorted((rank, key) for key, rank in ranks.items())), unsuitable)
