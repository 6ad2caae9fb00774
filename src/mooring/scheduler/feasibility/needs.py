"""What a request takes: on any node, and on a certain node."""

from functools import lru_cache
from typing import Protocol

from mooring.core.disk import DEFAULT_DISK_MIB, default_disk_mib
from mooring.core.gpu import model_matches
from mooring.core.node import proportional
from mooring.scheduler.model import NodeView, Request
from mooring_client.schemas.spec import WHOLE_MILLI

CPU_ONLY_CPU_MILLI = 1000
CPU_ONLY_MEMORY_MIB = 1024

# The cache saves two regular expressions per GPU: for a node of eight GPUs, 10 us instead of 49 us. It is
# bounded because users choose the names.
matches = lru_cache(maxsize=4096)(model_matches)


class Sized(Protocol):
    """A node, or a kind of nodes."""

    @property
    def cpu_milli(self) -> int: ...
    @property
    def allocatable_mib(self) -> int: ...
    @property
    def gpu_count(self) -> int: ...


def fixed(request: Request) -> tuple[int | None, int | None]:
    """CPUs (milli) and memory (MiB) that it takes on any node; None: the fair share for its GPUs."""
    cpu_milli, memory_mib = request.cpu_milli, request.memory_mib
    if not request.gpu_count:
        cpu_milli = CPU_ONLY_CPU_MILLI if cpu_milli is None else cpu_milli
        memory_mib = CPU_ONLY_MEMORY_MIB if memory_mib is None else memory_mib
    return cpu_milli, memory_mib


def needs(request: Request, node: Sized) -> tuple[int, int]:
    """CPUs (milli) and memory (MiB) that the request takes on this node.

    Omitted amounts are the fair share for its GPUs, or the `CPU_ONLY_` defaults. More GPUs than the node has
    add nothing: otherwise a node with too few GPUs would also be refused for its CPUs.
    """
    return cpus(request, node), memory(request, node)


def cpus(request: Request, node: Sized) -> int:
    """CPUs (milli) that the request takes on this node."""
    amount = request.cpu_milli if request.gpu_count else fixed(request)[0]
    return _share(node.cpu_milli, request, node.gpu_count) if amount is None else amount


def memory(request: Request, node: Sized) -> int:
    """MiB of memory that the request takes on this node."""
    amount = request.memory_mib if request.gpu_count else fixed(request)[1]
    return _share(node.allocatable_mib, request, node.gpu_count) if amount is None else amount


def disk(request: Request, node: NodeView) -> int:
    """MiB that the request takes on this node. A node that does not report its disk accepts the default."""
    if request.disk_mib is None:
        return default_disk_mib(node.disk_mib) * request.stands_for
    return request.disk_mib


def fixed_disk(request: Request) -> int:
    """MiB that count against quotas, on any node."""
    return DEFAULT_DISK_MIB * request.stands_for if request.disk_mib is None else request.disk_mib


def _share(total: int, request: Request, gpus: int) -> int:
    node_milli = gpus * WHOLE_MILLI
    return proportional(total, min(gpu_milli(request), node_milli), node_milli) if node_milli else 0


def gpu_milli(request: Request) -> int:
    """Thousandths of a GPU that the request takes in total."""
    return request.gpu_count * request.gpu_milli


def preference(request: Request, model: str) -> int | None:
    """The position of the model in the request's order of preference; None if it does not match."""
    return _position(request.gpu_models, model) if request.gpu_models else 0


@lru_cache(maxsize=16_384)
def _position(wanted: tuple[str, ...], model: str) -> int | None:
    return next((position for position, name in enumerate(wanted) if matches(name, model)), None)
