"""What a request takes wherever it is placed; the rest is known once there is a node (`filters.needs`)."""

from functools import lru_cache

from mooring.core.gpu import model_matches
from mooring.scheduler.model import Request

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
