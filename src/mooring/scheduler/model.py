"""Input and output of the scheduler: a frozen snapshot and a frozen plan.

Amounts of GPU are in thousandths of one GPU ("milli"): 1000 is a whole one, 250 a quarter. Times are seconds
since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from mooring.core.node import allocatable_memory_mib
from mooring.core.policy import Policy
from mooring.scheduler.packing.potential import Potential
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import DEFAULT_PRIORITY, WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class MigView:
    """One MIG device that exists on a GPU; it is allocated whole."""

    uuid: str
    profile: str  # as NVML names it: 1g.10gb
    free: bool


@dataclass(frozen=True, slots=True)
class ReservedPeriod:
    """A reservation of one GPU for one project: other projects may use it only outside of the period."""

    reservation_id: str
    project_id: str
    from_at: float
    to_at: float


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU. With MIG enabled, its MIG devices are allocated and never the GPU itself."""

    uuid: str
    index: int
    model: str
    memory_mib: int
    healthy: bool
    milli_free: int = WHOLE_MILLI
    project_id: str | None = None  # owner of the shares on it; other projects get none (R12)
    nvlink: Mapping[str, int] = field(default_factory=dict)  # peer's UUID -> lanes
    topology: Mapping[str, str] = field(default_factory=dict)  # peer's UUID -> nearest common ancestor
    compute_capability: str | None = None  # "9.0"; null: unknown
    numa_node: int | None = None
    mig_enabled: bool = False
    mig: tuple[MigView, ...] = ()
    reserved: tuple[ReservedPeriod, ...] = ()
    last: bool = False  # it has a fault: allocated only where nothing else fits

    @property
    def free(self) -> bool:
        """Whether nothing of it is allocated."""
        return self.milli_free == WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class GpuAllocation:
    """What an instance has of one GPU: all of it, thousandths of it, or one MIG device on it."""

    gpu_uuid: str
    milli: int = WHOLE_MILLI
    mig_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """An instance with resources of a node, in any state."""

    instance_id: str
    project_id: str
    allocations: tuple[GpuAllocation, ...]
    cpu_milli: int
    memory_mib: int
    priority: int
    preemptible: bool
    since: float  # when it was placed
    ends_at: float | None  # from its declared duration, or its grace period when it is stopping
    stopping: bool = False  # evicting it gains nothing
    group_id: str | None = None
    disk_mib: int = 0

    @classmethod
    def of(cls, placed: "Placement", request: "Request", at: "PlanTime") -> "Running":
        """The request once it is placed."""
        return cls(
            instance_id=request.instance_id,
            project_id=request.project_id,
            allocations=placed.allocations,
            cpu_milli=placed.cpu_milli,
            memory_mib=placed.memory_mib,
            priority=request.priority,
            preemptible=request.preemptible,
            since=at.now,
            ends_at=at.declared_end(request),
            group_id=request.gang.group_id if request.gang else None,
            disk_mib=placed.disk_mib,
        )

    @property
    def gpu_milli(self) -> int:
        return sum(allocation.milli for allocation in self.allocations)


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
    swarm: str | None = None  # the id of its Docker Swarm
    mps: bool = False  # its MPS daemon enforces GPU shares
    reserved_for: frozenset[str] | None = None  # projects that may place instances; null: all
    running: tuple[Running, ...] = ()
    disk_mib: int | None = None  # for instances; null: not reported by the node's agent
    disk_mib_free: int = 0
    disk_enforced: bool = False  # its engine enforces the disk limits of containers
    disk_pressure: bool = False  # its filesystem is nearly full, whatever filled it
    mounts_volumes: bool = False  # its agent supports volumes

    @property
    def gpu_count(self) -> int:
        return len(self.gpus)

    @property
    def allocatable_mib(self) -> int:
        return allocatable_memory_mib(self.memory_mib)


@dataclass(frozen=True, slots=True)
class Over:
    """A quota that a request would exceed; amounts in the quota's own unit."""

    quota: str  # as `Quota.limits` names it, or gpu_hours_per_day, gpu_hours_per_month
    limit: float
    used: float
    asked: float | None  # null: the quota is a running total, to which a request adds until it ends
    resets_at: str | None = None  # when a running total restarts from 0


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a project and what counts against them.

    Amounts are by name: gpus (milli), gpus_by_model.<words of the model> (milli), instances, cpus (milli),
    memory_mib, disk_mib. Amounts without a limit are omitted; what is not in `placed` or `waiting` is 0.
    """

    limits: Mapping[str, int]
    placed: Mapping[str, int]
    waiting: Mapping[str, int]  # of pending requests: only amounts that are the same on every node
    spent: Over | None = None  # set once its GPU-hours are used up: then no request with GPUs is placed


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Used GPU-seconds, CPU-seconds and MiB-seconds; what was used a half-life ago counts half."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    memory_mib_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProjectView:
    """The facts of a project that order the queue."""

    weight: float = 1.0
    used: ResourceUsage = ResourceUsage()
    guaranteed_gpu_milli: int | None = None  # what it can reclaim at any time; null: 0


@dataclass(frozen=True, slots=True)
class Gang:
    """Requests that are placed all together or not at all."""

    group_id: str
    size: int  # all members of the group, placed ones included
    network: Literal["overlay", "host"]  # overlay: nodes of one swarm, or one node


@dataclass(frozen=True, slots=True)
class VolumeNeeds:
    """What the volumes that a request mounts require of its node, besides an agent that supports volumes."""

    node_ids: frozenset[str] = frozenset()  # of its local volumes; none or one can have all of them
    selector: tuple[tuple[str, str], ...] = ()  # labels, of local volumes that have no node yet
    where: str = ""  # for people: "volume data is on gpu-7"; empty: nowhere yet

    def permit(self, node: "NodeView") -> bool:
        """Whether the node can have all the volumes."""
        return (
            node.mounts_volumes
            and self.node_ids <= {node.id}
            and all(node.labels.get(key) == value for key, value in self.selector)
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A pending instance. Null CPUs or memory stand for defaults (see `needs`)."""

    instance_id: str
    queued_at: float
    gpu_count: int
    gpu_models: tuple[str, ...]  # words of the NVML name, preferred first; empty: any
    gpu_min_memory_mib: int | None
    cpu_milli: int | None
    memory_mib: int | None
    node_selector: Mapping[str, str]
    project_id: str = ""
    quota: Quota | None = None  # the project's current one; null: no limit
    gpu_milli: int = WHOLE_MILLI  # of each GPU; a share is of one GPU only
    mig_profile: str | None = None
    gpu_min_compute_capability: str | None = None
    same_numa: bool = False
    priority: int = DEFAULT_PRIORITY
    preemptible: bool = False
    max_duration_s: int | None = None  # declared; null: unlimited
    gang: Gang | None = None
    project_selector: Mapping[str, str] = field(default_factory=dict)  # set by an admin for the project
    disk_mib: int | None = None  # null: the default of the node (see `disk`)
    disk_limits: bool = False  # its project requires a node that enforces disk limits
    volume_needs: VolumeNeeds | None = None  # null: it mounts no volume
    stands_for: int = 1  # how many instances: more than 1 if the members of a gang are tried as one request

    @property
    def selector(self) -> Mapping[str, str]:
        """The labels that a node must have. The project's value wins where both name a key."""
        if not self.project_selector:
            return self.node_selector
        return {**self.node_selector, **self.project_selector}


@dataclass(frozen=True, slots=True)
class PlanTime:
    """The time at which a request would be placed."""

    now: float
    overhead_s: float = Policy.start_overhead_s  # see `Policy`

    def declared_end(self, request: Request) -> float | None:
        """When the request's declared duration ends if it begins now; null: unlimited."""
        return None if request.max_duration_s is None else self.now + request.max_duration_s

    def end_of(self, request: Request) -> float:
        """When the request will have ended if it is placed now; infinite without a declared duration."""
        end = self.declared_end(request)
        return inf if end is None else end + self.overhead_s


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[NodeView, ...]
    requests: tuple[Request, ...]
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # of the projects that have limits
    projects: Mapping[str, ProjectView] = field(default_factory=dict)
    now: float = 0.0
    policy: Policy = field(default_factory=Policy)
    potential: Potential | None = None  # measures wasted GPUs; null: no demand was learnt yet
    with_slots: frozenset[str] = frozenset()  # of the previous plan; these instances keep their position

    @property
    def at(self) -> PlanTime:
        return PlanTime(self.now, self.policy.start_overhead_s)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one node cannot host one request now: what was wanted and what the node had."""

    node_id: str
    node_name: str
    code: str
    wanted: str
    had: str


@dataclass(frozen=True, slots=True)
class Placement:
    instance_id: str
    node_id: str
    allocations: tuple[GpuAllocation, ...]
    cpu_milli: int
    memory_mib: int
    link_score: float | None = None  # 1: no set of the node's GPUs is better connected; null: one GPU, or MIG
    borrowed: bool = False  # beyond its project's guarantee; others may reclaim it
    disk_mib: int = 0

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(allocation.gpu_uuid for allocation in self.allocations)


@dataclass(frozen=True, slots=True)
class Eviction:
    """An instance to evict, and the instance for which it makes room."""

    instance_id: str
    node_id: str
    for_instance_id: str
    because: Literal["priority", "reclaim"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """When and where a pending request will start, from declared durations."""

    instance_id: str
    starts_at: float | None  # null: it depends on an instance without a declared end
    node_ids: tuple[str, ...]
    waits_for: tuple[str, ...]  # instances that must end first


@dataclass(frozen=True, slots=True)
class Unplaced:
    instance_id: str
    refusals: tuple[Refusal, ...]  # empty in a plan: `reasons.explain` lists those of one request
    ever: bool  # whether an empty, schedulable and healthy node could host it
    summary: str  # one sentence for people: "no node has 2 free H100 (best: 1 on gpu-7)"
    over: Over | None = None  # the quota that it waits for
    code: str = "waiting_for_capacity"  # the reason's; see docs/errors.md
