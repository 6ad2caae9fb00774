"""A cluster in which tasks arrive and end; a policy is asked at the full minute after that what starts.

Which is why even what never waits has waited for half a minute in the mean.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log

from benchmarks.month_workload import Job
from benchmarks.trace import Machine
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState, allocatable_memory_mib
from mooring.scheduler.model import (
    GpuView,
    NodeView,
    Placement,
    PlanTime,
    Policy,
    ProjectView,
    Request,
    ResourceUsage,
    Running,
    Snapshot,
)
from mooring.scheduler.node_changes import as_running, with_placement, without

LOOK_S = 60
# What starts now, of those that wait, which come in the order of their arrival.
Decide = Callable[["Cluster", Sequence[Request]], Sequence[Placement]]


@dataclass(slots=True)
class Held:
    gpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0


@dataclass
class Cluster:
    """The nodes as they are at `now`, what runs on them and what each project has used."""

    machines: Sequence[Machine]
    policy: Policy
    now: float = 0.0
    nodes: dict[str, NodeView] = field(init=False)
    used: dict[str, ResourceUsage] = field(default_factory=dict)  # by project, as are those that follow
    held: dict[str, Held] = field(default_factory=dict)
    placed: dict[str, tuple[str, Running]] = field(default_factory=dict)  # by instance: the node and what

    def __post_init__(self) -> None:
        self.nodes = {machine.name: _node(machine) for machine in self.machines}
        self.gpus = sum(machine.gpus for machine in self.machines)

    def snapshot(self, requests: Sequence[Request]) -> Snapshot:
        return Snapshot(
            nodes=tuple(self.nodes.values()),
            requests=tuple(requests),
            projects={project_id: ProjectView(used=used) for project_id, used in self.used.items()},
            now=self.now,
            policy=self.policy,
        )

    def advance(self, to: float) -> None:
        """Let time pass: what is held is used, and what was used counts less."""
        seconds, half_life = to - self.now, self.policy.usage_half_life_s
        kept = exp(-log(2) * seconds / half_life)
        # The integral of a constant rate that is halved as it goes.
        grown = (1 - kept) * half_life / log(2)
        for project_id, held in self.held.items():
            before = self.used.get(project_id, ResourceUsage())
            self.used[project_id] = ResourceUsage(
                before.gpu_s * kept + held.gpu_milli / 1000 * grown,
                before.cpu_s * kept + held.cpu_milli / 1000 * grown,
                before.memory_mib_s * kept + held.memory_mib * grown,
            )
        self.now = to

    def place(self, placement: Placement, request: Request) -> None:
        moment = PlanTime(self.now, self.policy.start_overhead_s)
        node_id = placement.node_id
        self.nodes[node_id] = with_placement(self.nodes[node_id], placement, request, moment)
        running = as_running(placement, request, moment)
        self.placed[request.instance_id] = node_id, running
        self._hold(running, +1)

    def end(self, instance_id: str) -> None:
        node_id, running = self.placed.pop(instance_id)
        self.nodes[node_id] = without(self.nodes[node_id], [running])
        self._hold(running, -1)

    def _hold(self, running: Running, sign: int) -> None:
        held = self.held.setdefault(running.project_id, Held())
        held.gpu_milli += sign * running.gpu_milli
        held.cpu_milli += sign * running.cpu_milli
        held.memory_mib += sign * running.memory_mib


@dataclass(frozen=True, slots=True)
class Started:
    job: Job
    at: float
    placement: Placement

    @property
    def waited_s(self) -> float:
        return self.at - self.job.arrives_at


@dataclass(frozen=True, slots=True)
class Interval:
    """What every project held, and what it wanted, that included, of the GPUs (milli) for some seconds."""

    seconds: float
    held: Mapping[str, int]
    wanted: Mapping[str, int]


@dataclass(slots=True)
class Outcome:
    gpus: int
    started: list[Started] = field(default_factory=list)  # in this order
    intervals: list[Interval] = field(default_factory=list)
    never: list[Job] = field(default_factory=list)  # what waited to the very end
    asked: int = 0  # times that the policy was asked


def simulate(jobs: Sequence[Job], cluster: Cluster, decide: Decide) -> Outcome:
    """Run the month and what it leaves behind, to the last end."""
    return _Month(jobs, cluster, decide).run()


class _Month:
    def __init__(self, jobs: Sequence[Job], cluster: Cluster, decide: Decide) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._cluster = cluster
        self._decide = decide
        self._ahead = [(job.arrives_at, job.name) for job in jobs]
        heapq.heapify(self._ahead)
        self._ends: list[tuple[float, str]] = []
        self._waiting: dict[str, Request] = {}
        self._wanted: Counter[str] = Counter()
        self._outcome = Outcome(cluster.gpus)

    def run(self) -> Outcome:
        while self._ahead or self._ends:
            event = min(events[0][0] for events in (self._ahead, self._ends) if events)
            self._happen_until(LOOK_S * ceil(event / LOOK_S))
            if self._waiting:
                self._ask()
        self._outcome.never = [self._jobs[name] for name in self._waiting]
        return self._outcome

    def _happen_until(self, look_at: float) -> None:
        while self._ends and self._ends[0][0] <= look_at:
            at, name = heapq.heappop(self._ends)
            self._arrive_until(at)
            self._pass_time(at)
            self._cluster.end(name)
            self._wanted[self._jobs[name].project] -= self._jobs[name].asks.milli
        self._arrive_until(look_at)
        self._pass_time(look_at)

    def _arrive_until(self, at: float) -> None:
        while self._ahead and self._ahead[0][0] <= at:
            arrives_at, name = heapq.heappop(self._ahead)
            self._pass_time(arrives_at)
            self._waiting[name] = _request(self._jobs[name])
            self._wanted[self._jobs[name].project] += self._jobs[name].asks.milli

    def _pass_time(self, to: float) -> None:
        if (seconds := to - self._cluster.now) > 0:
            held = {project: of.gpu_milli for project, of in self._cluster.held.items()}
            self._outcome.intervals.append(Interval(seconds, held, dict(self._wanted)))
            self._cluster.advance(to)

    def _ask(self) -> None:
        self._outcome.asked += 1
        now = self._cluster.now
        for placement in self._decide(self._cluster, list(self._waiting.values())):
            name = placement.instance_id
            self._cluster.place(placement, self._waiting.pop(name))
            self._outcome.started.append(Started(self._jobs[name], now, placement))
            heapq.heappush(self._ends, (now + self._jobs[name].runs_s, name))


def _node(machine: Machine) -> NodeView:
    gpus = tuple(
        GpuView(f"{machine.name}-{index}", index, machine.model, 32 * 1024, healthy=True)
        for index in range(machine.gpus)
    )
    return NodeView(
        id=machine.name, name=machine.name, state=NodeState.READY, labels={}, cpu_milli=machine.cpu_milli,
        memory_mib=machine.memory_mib, cpu_milli_free=machine.cpu_milli,
        memory_mib_free=allocatable_memory_mib(machine.memory_mib), gpus=gpus,
    )  # fmt: skip


def _request(job: Job) -> Request:
    asks = job.asks
    return Request(
        instance_id=job.name, queued_at=job.arrives_at, gpu_count=asks.gpus, gpu_models=asks.models,
        gpu_min_memory_mib=None, cpu_milli=asks.cpu_milli, memory_mib=asks.memory_mib, node_selector={},
        project_id=job.project, gpu_milli=asks.gpu_milli or WHOLE_MILLI,
        max_duration_s=job.declared_s,
    )  # fmt: skip
