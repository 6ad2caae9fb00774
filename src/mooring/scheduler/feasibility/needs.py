"""What a request takes: wherever it is placed, and on a certain node."""

from functools import lru_cache

from mooring.core.gpu import model_matches
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import allocatable_memory_mib, fair_share
from mooring.scheduler.model import NodeView, Request

CPU_ONLY_CPU_MILLI = 1000
CPU_ONLY_MEMORY_MIB = 1024

# Without it two regular expressions per GPU: 49 us per node of eight GPUs instead of 10. A pure function's
# memory, and bounded, because the asked names are written by users.
matches = lru_cache(maxsize=4096)(model_matches)


def fixed(request: Request) -> tuple[int | None, int | None]:
    """The CPUs (milli) and memory (MiB) that it takes on every node; null: the share beside its GPUs."""
    cpu_milli, memory_mib = request.cpu_milli, request.memory_mib
    if not request.gpu_count:
        cpu_milli = CPU_ONLY_CPU_MILLI if cpu_milli is None else cpu_milli
        memory_mib = CPU_ONLY_MEMORY_MIB if memory_mib is None else memory_mib
    return cpu_milli, memory_mib


def needs(request: Request, node: NodeView) -> tuple[int, int]:
    """The CPUs (milli) and memory (MiB) that the request takes on this node.

    What it leaves open is the share that goes with its GPUs. GPUs that the node does not have bring no
    share: they are refused as GPUs, and would otherwise be refused a second time as CPUs.
    """
    return needs_beside(request, node.cpu_milli, allocatable_memory_mib(node.memory_mib), len(node.gpus))


def needs_beside(request: Request, cpu_milli: int, memory_mib: int, gpus: int) -> tuple[int, int]:
    """As `needs`, of a node that can give out so much and has so many cards."""
    cpus, memory = fixed(request)
    if cpus is None:
        cpus = _share(cpu_milli, request, gpus)
    if memory is None:
        memory = _share(memory_mib, request, gpus)
    return cpus, memory


def _share(total: int, request: Request, gpus: int) -> int:
    there = gpus * WHOLE_MILLI
    return fair_share(total, min(gpu_milli(request), there), there) if there else 0


def gpu_milli(request: Request) -> int:
    """Thousandths of GPUs in all."""
    return request.gpu_count * request.gpu_milli


def preference(request: Request, model: str) -> int | None:
    """The place of the model among those asked for, the preferred first; null if it will not do."""
    return _place(request.gpu_models, model) if request.gpu_models else 0


@lru_cache(maxsize=16_384)
def _place(wanted: tuple[str, ...], model: str) -> int | None:
    return next((place for place, asked in enumerate(wanted) if matches(asked, model)), None)
