"""The words of packing: what a node is, what it has left, and what a request takes of one."""

from dataclasses import dataclass
from hashlib import blake2b

from mooring.core.instance.spec import WHOLE_MILLI

TIE_BITS = 40


@dataclass(frozen=True, slots=True)
class NodeClass:
    """What never changes about a node. Totals are what instances may have, not what the hardware has."""

    cpu_milli: int
    memory_mib: int
    models: tuple[str, ...]  # of each GPU, by its place on the node; a MIG profile is a model of its own
    sizes: tuple[int, ...] = ()  # of each GPU: of equally good ones the smallest is given; (): all are alike


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node as it is now. `gpu_milli_free` is 0 for a GPU that nobody may be given (unhealthy, reserved)."""

    id: str
    kind: NodeClass
    cpu_milli_free: int
    memory_mib_free: int
    gpu_milli_free: tuple[int, ...]
    owners: tuple[str, ...] = ()  # of each GPU that is shared out in part; "" where nobody's; (): all ""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request takes of one node.

    Several GPUs are whole ones of one model; a share (`gpu_milli` below 1000) is of one GPU. Null CPUs or
    memory are the part of the node's that goes with the GPUs.
    """

    gpus: int
    gpu_milli: int  # of each GPU; 1000 for whole ones
    cpu_milli: int | None
    memory_mib: int | None
    models: frozenset[str] = frozenset()  # that will do; empty: all
    owner: str = ""  # whose: a share goes on no GPU that is shared out to somebody else

    @property
    def share(self) -> bool:
        return self.gpus == 1 and self.gpu_milli < WHOLE_MILLI

    def takes(self, kind: NodeClass) -> tuple[int, int]:
        """The CPUs (milli) and memory (MiB) that it takes on a node of this class."""
        cpu_milli, memory_mib = self.cpu_milli, self.memory_mib
        if cpu_milli is None:
            cpu_milli = self._part(kind.cpu_milli, kind)
        if memory_mib is None:
            memory_mib = self._part(kind.memory_mib, kind)
        return cpu_milli, memory_mib

    def _part(self, total: int, kind: NodeClass) -> int:
        there = len(kind.models)
        return (
            total * min(self.gpus * self.gpu_milli, there * WHOLE_MILLI) // (there * WHOLE_MILLI)
            if there
            else 0
        )


@dataclass(frozen=True, slots=True)
class Move:
    """Where a request would go. The best has the highest score; `gpus` are places on the node."""

    node: int  # its index in the fleet
    gpus: tuple[int, ...]
    score: int


def tie_of(node_id: str) -> int:
    """A fixed, patternless order of nodes, for those that are equally good (40 bits)."""
    return int.from_bytes(blake2b(node_id.encode(), digest_size=6).digest(), "big") >> (48 - TIE_BITS)
