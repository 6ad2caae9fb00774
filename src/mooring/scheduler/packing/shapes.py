"""The data types of packing: nodes, request shapes and moves."""

from dataclasses import dataclass
from hashlib import blake2b

from mooring_client.schemas.spec import WHOLE_MILLI

TIE_BITS = 40


@dataclass(frozen=True, slots=True)
class NodeClass:
    """The fixed properties of a node. CPUs and memory are those that instances may use, not all there are."""

    cpu_milli: int
    memory_mib: int
    models: tuple[str, ...]  # of each GPU, by place on the node; a MIG profile is a separate model
    sizes: tuple[int, ...] = ()  # of each GPU: of equally good ones the smallest is used; (): all equal


@dataclass(frozen=True, slots=True)
class FleetNode:
    """What is free on a node. Of an unhealthy GPU, 0 is free; of CPUs and memory of a closed node, -1."""

    id: str
    node_class: NodeClass
    cpu_milli_free: int
    memory_mib_free: int
    gpu_milli_free: tuple[int, ...]
    owners: tuple[str, ...] = ()  # of the shares on each GPU; "": not shared; (): no GPU is shared


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request needs on one node.

    Several GPUs are whole and of one model; a share (`gpu_milli` below 1000) is of one GPU. Null CPUs or
    memory stand for the share of the node's total that goes with the GPUs.
    """

    gpus: int
    gpu_milli: int  # per GPU; 1000: whole
    cpu_milli: int | None
    memory_mib: int | None
    models: frozenset[str] = frozenset()  # accepted; empty: all
    owner: str = ""  # a share cannot use a GPU that another owner shares

    @property
    def share(self) -> bool:
        return self.gpus == 1 and self.gpu_milli < WHOLE_MILLI

    def takes(self, node_class: NodeClass) -> tuple[int, int]:
        """The CPUs (milli) and memory (MiB) needed on a node of this class."""
        cpu_milli, memory_mib = self.cpu_milli, self.memory_mib
        if cpu_milli is None:
            cpu_milli = self._share_of(node_class.cpu_milli, node_class)
        if memory_mib is None:
            memory_mib = self._share_of(node_class.memory_mib, node_class)
        return cpu_milli, memory_mib

    def _share_of(self, total: int, node_class: NodeClass) -> int:
        node_milli = len(node_class.models) * WHOLE_MILLI
        return total * min(self.gpus * self.gpu_milli, node_milli) // node_milli if node_milli else 0


@dataclass(frozen=True, slots=True)
class Move:
    """A possible placement; the highest score is the best."""

    node: int  # index in the fleet
    gpus: tuple[int, ...]  # places on the node
    score: int


def tie_of(node_id: str) -> int:
    """A fixed pseudo-random order to break ties between nodes (40 bits)."""
    return int.from_bytes(blake2b(node_id.encode(), digest_size=6).digest(), "big") >> (48 - TIE_BITS)
