"""What the scheduler sees and what it says: a frozen world in, a frozen plan out."""

from collections.abc import Mapping
from dataclasses import dataclass

from mooring.core.node import NodeState


@dataclass(frozen=True, slots=True)
class GpuView:
    uuid: str
    index: int
    model: str
    memory_mib: int
    free: bool  # no live allocation
    healthy: bool
    nvlink: Mapping[str, int]  # peer's UUID -> lanes
    topology: Mapping[str, str]  # peer's UUID -> nearest common ancestor (internal … system)


@dataclass(frozen=True, slots=True)
class NodeView:
    id: str
    name: str
    state: NodeState
    labels: Mapping[str, str]
    cpu_milli: int
    memory_mib: int
    cpu_milli_free: int
    memory_mib_free: int
    gpus: tuple[GpuView, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A pending instance. Null CPUs or memory mean the fair share of the node (see `needs`)."""

    instance_id: str
    queued_at: float  # seconds since the epoch; oldest first
    gpu_count: int
    gpu_model: str | None
    gpu_min_memory_mib: int | None
    cpu_milli: int | None
    memory_mib: int | None
    node_selector: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[NodeView, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one node cannot host one request now: what was wanted of it and what it had."""

    node_id: str
    node_name: str
    code: str
    wanted: str
    had: str


@dataclass(frozen=True, slots=True)
class Placement:
    instance_id: str
    node_id: str
    gpu_uuids: tuple[str, ...]
    cpu_milli: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Unplaced:
    instance_id: str
    refusals: tuple[Refusal, ...]
    ever: bool  # whether some node could host it if it were empty, schedulable and healthy
    summary: str  # one sentence for people: "no node has 2 free H100 (best: 1 on gpu-7)"


@dataclass(frozen=True, slots=True)
class Plan:
    placements: tuple[Placement, ...]
    unplaced: tuple[Unplaced, ...]
