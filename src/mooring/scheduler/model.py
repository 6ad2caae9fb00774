"""What the scheduler sees and what it says: a frozen world in, a frozen plan out.

Amounts of GPU are in thousandths of one card ("milli"): 1000 is a whole one, 250 a quarter. Times are seconds
since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from mooring.core.instance.spec import DEFAULT_PRIORITY, WHOLE_MILLI
from mooring.core.node import NodeState
from mooring.scheduler.packing.potential import Potential


@dataclass(frozen=True, slots=True)
class MigView:
    """One MIG device that exists on a card; it is given out whole."""

    uuid: str
    profile: str  # as NVML names it: 1g.10gb
    free: bool


@dataclass(frozen=True, slots=True)
class ReservedPeriod:
    """A reservation of one card for one project: others may use it only outside of these times."""

    reservation_id: str
    project_id: str
    from_at: float
    to_at: float


@dataclass(frozen=True, slots=True)
class GpuView:
    """A card. With MIG enabled it is given out by its MIG devices and never itself."""

    uuid: str
    index: int
    model: str
    memory_mib: int
    healthy: bool
    milli_free: int = WHOLE_MILLI
    project_id: str | None = None  # whose shares are on it: no other project's may be (R12)
    nvlink: Mapping[str, int] = field(default_factory=dict)  # peer's UUID -> lanes
    topology: Mapping[str, str] = field(default_factory=dict)  # peer's UUID -> nearest common ancestor
    compute_capability: str | None = None  # "9.0"; null: the card does not tell
    numa_node: int | None = None
    mig_enabled: bool = False
    mig: tuple[MigView, ...] = ()
    holds: tuple[ReservedPeriod, ...] = ()
    last: bool = False  # something is wrong with it: given out where nothing else fits

    @property
    def free(self) -> bool:
        """Whether nothing at all of it is given out."""
        return self.milli_free == WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class GpuAllocation:
    """What an instance has of one card: all of it, thousandths of it, or one MIG device on it."""

    gpu_uuid: str
    milli: int = WHOLE_MILLI
    mig_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """An instance that holds part of a node, in whatever state."""

    instance_id: str
    project_id: str
    grants: tuple[GpuAllocation, ...]
    cpu_milli: int
    memory_mib: int
    priority: int
    preemptible: bool
    since: float  # when it was placed
    ends_at: float | None  # by its declared duration, or by its grace period when it is being stopped
    stopping: bool = False  # it is on its way out: nothing is gained by evicting it
    group_id: str | None = None
    disk_mib: int = 0

    @property
    def gpu_milli(self) -> int:
        return sum(grant.milli for grant in self.grants)


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
    swarm: str | None = None  # the id of the Docker Swarm that its daemon is in
    mps: bool = False  # the MPS daemon enforces shares of its cards
    reserved_for: frozenset[str] | None = None  # the only projects whose instances may be placed; null: all
    running: tuple[Running, ...] = ()
    disk_mib: int | None = None  # that instances may have; null: its agent does not report it
    disk_mib_free: int = 0
    disk_enforced: bool = False  # its engine holds containers to what they were given
    disk_pressure: bool = False  # its filesystem is nearly full, whoever filled it


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

    Amounts are by name: gpus (milli), gpus_by_model.<words of the model> (milli), instances, cpus (milli),
    memory_mib, disk_mib. What limits nothing is in none of them; what is not in `placed` or `waiting` is 0.
    """

    limits: Mapping[str, int]
    placed: Mapping[str, int]
    waiting: Mapping[str, int]  # of what is pending, as far as it does not depend on where it is placed
    spent: Over | None = None  # its GPU-hours are used up: nothing with GPUs is placed


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """GPU-seconds, CPU-seconds and MiB-seconds; what is long ago counts half for every half-life."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    memory_mib_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProjectView:
    """What the order of the queue depends on."""

    weight: float = 1.0
    used: ResourceUsage = ResourceUsage()
    guaranteed_gpu_milli: int | None = None  # what it may take back at any time; null: as 0


@dataclass(frozen=True, slots=True)
class Gang:
    """Requests that are placed all together or not at all."""

    group_id: str
    size: int  # members in the group, those that hold something already included
    network: Literal["overlay", "host"]  # overlay: nodes of one swarm; of one node it needs neither


@dataclass(frozen=True, slots=True)
class Request:
    """A pending instance. Null CPUs or memory mean the fair share of the node (see `needs`)."""

    instance_id: str
    queued_at: float
    gpu_count: int
    gpu_models: tuple[str, ...]  # words of the NVML name, the preferred first; empty: any
    gpu_min_memory_mib: int | None
    cpu_milli: int | None
    memory_mib: int | None
    node_selector: Mapping[str, str]
    project_id: str = ""
    quota: Quota | None = None  # of its project, at this moment; null: no limit
    gpu_milli: int = WHOLE_MILLI  # of each; less than a whole one only of one card
    mig_profile: str | None = None
    gpu_min_compute_capability: str | None = None
    same_numa: bool = False
    priority: int = DEFAULT_PRIORITY
    preemptible: bool = False
    max_duration_s: int | None = None  # declared; null: it may run for ever
    gang: Gang | None = None
    project_selector: Mapping[str, str] = field(default_factory=dict)  # set by an admin for the project
    disk_mib: int | None = None  # null: the default of the node (see `disk`)
    disk_limits: bool = False  # its project requires a node that enforces them
    stands_for: int = 1  # instances: a gang is also tried as one request

    @property
    def selector(self) -> Mapping[str, str]:
        """The labels that a node must have. The project's value wins where both name a key."""
        if not self.project_selector:
            return self.node_selector
        return {**self.node_selector, **self.project_selector}


@dataclass(frozen=True, slots=True)
class Policy:
    """How the queue is kept; each is a setting of the server."""

    backfill: Literal["easy", "conservative"] = "easy"  # a reservation for the first that waits, or for each
    usage_half_life_s: float = 7 * 86_400.0
    overdue_after_s: float = 86_400.0  # who has waited longer comes first among its priority, whoever it is
    preemption_min_run_s: float = 300.0  # what was placed more recently is not evicted
    start_overhead_s: float = 30.0  # allowed for stopping, starting and pulling in every predicted end


@dataclass(frozen=True, slots=True)
class PlanTime:
    """When something would be placed: what it takes then must not be promised to others for that time."""

    now: float
    overhead_s: float = 30.0  # as `Policy.start_overhead_s`

    def end_of(self, request: Request) -> float:
        """By when the request will have gone if it is placed at this moment; infinite if it does not tell."""
        if request.max_duration_s is None:
            return inf
        return self.now + request.max_duration_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[NodeView, ...]
    requests: tuple[Request, ...]
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # of the projects that have limits
    projects: Mapping[str, ProjectView] = field(default_factory=dict)
    now: float = 0.0
    policy: Policy = Policy()
    potential: Potential | None = None  # what waste of GPUs is judged by; null: nothing was learnt yet
    promised: frozenset[str] = frozenset()  # as the plan before: whoever is promised a moment keeps it

    @property
    def at(self) -> PlanTime:
        return PlanTime(self.now, self.policy.start_overhead_s)


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
    grants: tuple[GpuAllocation, ...]
    cpu_milli: int
    memory_mib: int
    link_score: float | None = None  # of several cards: 1 where no better connected set of the node exists
    borrowed: bool = False  # beyond what its project is guaranteed, which others may take back
    disk_mib: int = 0

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(grant.gpu_uuid for grant in self.grants)


@dataclass(frozen=True, slots=True)
class Eviction:
    """An instance that gives way, and the one that it gives way to."""

    instance_id: str
    node_id: str
    for_instance_id: str
    because: Literal["priority", "reclaim"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A waiting request's reservation: when and where it will start as far as declared durations tell."""

    instance_id: str
    starts_at: float | None  # null: it depends on something that declared no end
    node_ids: tuple[str, ...]
    waits_for: tuple[str, ...]  # instances that must end first


@dataclass(frozen=True, slots=True)
class Unplaced:
    instance_id: str
    refusals: tuple[Refusal, ...]  # none in a plan: `reasons.explain` tells them of one request
    ever: bool  # whether some node could host it if it were empty, schedulable and healthy
    summary: str  # one sentence for people: "no node has 2 free H100 (best: 1 on gpu-7)"
    over: Over | None = None  # the quota that it waits for
    code: str = "waiting_for_capacity"  # the reason's; see docs/errors.md


@dataclass(frozen=True, slots=True)
class SchedulingPlan:
    placements: tuple[Placement, ...]
    unplaced: tuple[Unplaced, ...]
    evictions: tuple[Eviction, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    order: tuple[str, ...] = ()  # instances that still wait, in the order of the queue
    promised: tuple[str, ...] = ()  # of those with a forecast, who comes first among equals
