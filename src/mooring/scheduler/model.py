"""What the scheduler sees and what it says: a frozen world in, a frozen plan out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
class Over:
    """A quota that keeps a request out; amounts in the quota's own unit."""

    quota: str  # as `Quota.limits` names it, or gpu_hours_per_day, gpu_hours_per_month
    limit: float
    used: float
    asked: float | None  # null: a running total; what a request adds to it is known when it has ended
    resets_at: str | None = None  # when a running total begins anew


@dataclass(frozen=True, slots=True)
class Quota:
    """What a project is limited to and what counts against it.

    Amounts are by name: gpus, gpus_by_model.<words of the model>, instances, cpus (milli), memory_mib. What
    limits nothing is in none of them, and what is not in `placed` or `waiting` is 0.
    """

    limits: Mapping[str, int]
    placed: Mapping[str, int]
    waiting: Mapping[str, int]  # of what is pending, as far as it does not depend on where it is placed
    spent: Over | None = None  # its GPU-hours are used up: nothing with GPUs is placed


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
    project_id: str = ""
    quota: Quota | None = None  # of its project, at this moment; null: no limit


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[NodeView, ...]
    requests: tuple[Request, ...]
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # of the projects that have limits


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
    over: Over | None = None  # the quota that it waits for


@dataclass(frozen=True, slots=True)
class Plan:
    placements: tuple[Placement, ...]
    unplaced: tuple[Unplaced, ...]
