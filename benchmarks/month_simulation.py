"""A cluster in which tasks arrive and end. Every full minute after a change, a policy decides what starts.

Because of these steps, the mean wait is about half a minute even in an empty cluster.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log

from benchmarks.month_workload import Job
from benchmarks.trace import Machine
from mooring.core.node import allocatable_memory_mib
from mooring.core.policy import Policy
from mooring.scheduler.model import (
    GpuView,
    NodeView,
    Placement,
    PlanTime,
    ProjectView,
    Request,
    ResourceUsage,
    Running,
    Snapshot,
)
from mooring.scheduler.node_changes import with_placement, without
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI

CYCLE_S = 60
# The waiting requests, in order of arrival -> what starts now.
Decide = Callable[["Cluster", Sequence[Request]], Sequence[Placement]]


@dataclass(slots=True)
class Held:
    """What the running tasks of a project use."""

    gpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0


@dataclass
class Cluster:
    """The nodes and running instances at the time `now`, and what each project has used."""

    machines: Sequence[Machine]
    policy: Policy
    now: float = 0.0
    nodes: dict[str, NodeView] = field(init=False)
    used: dict[str, ResourceUsage] = field(default_factory=dict)  # by project
    held: dict[str, Held] = field(default_factory=dict)  # by project
    placed: dict[str, tuple[str, Running]] = field(default_factory=dict)  # by instance: node and instance

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
        """Advance the time: decay what projects have used so far, and add what they hold now."""
        seconds, half_life = to - self.now, self.policy.usage_half_life_s
        decay = exp(-log(2) * seconds / half_life)
        # What a constant use of 1 adds up to in this time, with this decay.
        growth = (1 - decay) * half_life / log(2)
        for project_id, held in self.held.items():
            before = self.used.get(project_id, ResourceUsage())
            self.used[project_id] = ResourceUsage(
                before.gpu_s * decay + held.gpu_milli / 1000 * growth,
                before.cpu_s * decay + held.cpu_milli / 1000 * growth,
                before.memory_mib_s * decay + held.memory_mib * growth,
            )
        self.now = to

    def place(self, placement: Placement, request: Request) -> None:
        plan_time = PlanTime(self.now, self.policy.start_overhead_s)
        node_id = placement.node_id
        self.nodes[node_id] = with_placement(self.nodes[node_id], placement, request, plan_time)
        running = Running.of(placement, request, plan_time)
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
    """The GPUs (milli) that each project used, and wanted (used or waited for), for some seconds."""

    seconds: float
    held: Mapping[str, int]
    wanted: Mapping[str, int]


@dataclass(slots=True)
class Outcome:
    gpus: int
    started: list[Started] = field(default_factory=list)  # in the order of their starts
    intervals: list[Interval] = field(default_factory=list)
    never: list[Job] = field(default_factory=list)  # still waiting at the end
    cycles: int = 0  # calls of the policy


def simulate(jobs: Sequence[Job], cluster: Cluster, decide: Decide) -> Outcome:
    """Simulate the month, and continue until the last task has ended."""
    return _Month(jobs, cluster, decide).run()


class _Month:
    def __init__(self, jobs: Sequence[Job], cluster: Cluster, decide: Decide) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._cluster = cluster
        self._decide = decide
        self._arrivals = [(job.arrives_at, job.name) for job in jobs]
        heapq.heapify(self._arrivals)
        self._ends: list[tuple[float, str]] = []
        self._waiting: dict[str, Request] = {}
        self._wanted: Counter[str] = Counter()
        self._outcome = Outcome(cluster.gpus)

    def run(self) -> Outcome:
        while self._arrivals or self._ends:
            event = min(events[0][0] for events in (self._arrivals, self._ends) if events)
            self._run_until(CYCLE_S * ceil(event / CYCLE_S))
            if self._waiting:
                self._start_tasks()
        self._outcome.never = [self._jobs[name] for name in self._waiting]
        return self._outcome

    def _run_until(self, cycle_at: float) -> None:
        while self._ends and self._ends[0][0] <= cycle_at:
            at, name = heapq.heappop(self._ends)
            self._arrive_until(at)
            self._pass_time(at)
            self._cluster.end(name)
            self._wanted[self._jobs[name].project] -= self._jobs[name].task.milli
        self._arrive_until(cycle_at)
        self._pass_time(cycle_at)

    def _arrive_until(self, at: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= at:
            arrives_at, name = heapq.heappop(self._arrivals)
            self._pass_time(arrives_at)
            self._waiting[name] = _request(self._jobs[name])
            self._wanted[self._jobs[name].project] += self._jobs[name].task.milli

    def _pass_time(self, to: float) -> None:
        if (seconds := to - self._cluster.now) > 0:
            held = {project: each.gpu_milli for project, each in self._cluster.held.items()}
            self._outcome.intervals.append(Interval(seconds, held, dict(self._wanted)))
            self._cluster.advance(to)

    def _start_tasks(self) -> None:
        self._outcome.cycles += 1
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
    task = job.task
    return Request(
        instance_id=job.name, queued_at=job.arrives_at, gpu_count=task.gpus, gpu_models=task.models,
        gpu_min_memory_mib=None, cpu_milli=task.cpu_milli, memory_mib=task.memory_mib, node_selector={},
        project_id=job.project, gpu_milli=task.gpu_milli or WHOLE_MILLI,
        max_duration_s=job.declared_s,
    )  # fmt: skip
