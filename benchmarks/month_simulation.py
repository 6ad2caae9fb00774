"""A cluster in which only events happen, arrivals and ends; the production scheduler is asked after each."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log

from benchmarks.month_workload import Machine, Task
from mooring.core.node import NodeState, allocatable_memory_mib
from mooring.scheduler.changes import as_running, with_placement, without
from mooring.scheduler.model import (
    GpuView,
    Moment,
    NodeView,
    Placement,
    Policy,
    Project,
    Request,
    Running,
    Snapshot,
    Usage,
)

# What starts now, of those that wait, which come in the order of their arrival.
Decide = Callable[["Cluster", Sequence[Request]], Sequence[Placement]]


@dataclass(slots=True)
class Started:
    task: Task
    waited_s: float


@dataclass(slots=True)
class Interval:
    """What every project had and wanted of the GPUs for some seconds."""

    seconds: float
    held: dict[str, float]
    wanted: dict[str, float]


@dataclass
class Cluster:
    """The nodes as they are at `now`, what runs on them and what each project has used."""

    machines: Sequence[Machine]
    policy: Policy
    now: float = 0.0
    nodes: dict[str, NodeView] = field(default_factory=dict)
    used: dict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))
    held: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    placed: dict[str, Running] = field(default_factory=dict)
    at: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = {machine.name: _node(machine) for machine in self.machines}
        self.gpus = sum(machine.gpus for machine in self.machines)

    def snapshot(self, requests: Sequence[Request]) -> Snapshot:
        return Snapshot(
            nodes=tuple(self.nodes.values()),
            requests=tuple(requests),
            projects={request.project_id: self._project(request.project_id) for request in requests},
            now=self.now,
            policy=self.policy,
        )

    def _project(self, project_id: str) -> Project:
        return Project(used=self.used[project_id])

    def advance(self, to: float) -> None:
        """Let time pass: what is held is used, and what was used counts less."""
        seconds, half_life = to - self.now, self.policy.usage_half_life_s
        kept = exp(-log(2) * seconds / half_life)
        # The integral of a constant rate that is halved as it goes.
        grown = (1 - kept) * half_life / log(2)
        for project in set(self.used) | set(self.held):
            before, (gpus, cpus, memory) = self.used[project], self.held[project]
            self.used[project] = Usage(
                before.gpu_s * kept + gpus * grown,
                before.cpu_s * kept + cpus * grown,
                before.memory_mib_s * kept + memory * grown,
            )
        self.now = to

    def place(self, placement: Placement, request: Request) -> None:
        moment = Moment(self.now, self.policy.start_overhead_s)
        self.nodes[placement.node_id] = with_placement(
            self.nodes[placement.node_id], placement, request, moment
        )
        running = as_running(placement, request, moment)
        self.placed[request.instance_id], self.at[request.instance_id] = running, placement.node_id
        self._hold(running, +1)

    def end(self, instance_id: str) -> None:
        running, node_id = self.placed.pop(instance_id), self.at.pop(instance_id)
        self.nodes[node_id] = without(self.nodes[node_id], [running])
        self._hold(running, -1)

    def _hold(self, running: Running, sign: int) -> None:
        held = self.held[running.project_id]
        held[0] += sign * running.gpu_milli / 1000
        held[1] += sign * running.cpu_milli / 1000
        held[2] += sign * running.memory_mib


@dataclass(slots=True)
class Outcome:
    started: list[Started]
    intervals: list[Interval]
    never: int  # tasks that waited to the very end
    asked: int  # times that the scheduler was asked


def simulate(tasks: Sequence[Task], cluster: Cluster, decide: Decide) -> Outcome:
    """Run the month and what it leaves behind, to the last end."""
    by_name = {task.name: task for task in tasks}
    events: list[tuple[float, int, str]] = [(task.arrives_at, 1, task.name) for task in tasks]
    heapq.heapify(events)
    waiting: dict[str, Request] = {}
    outcome = Outcome([], [], 0, 0)
    while events:
        at = events[0][0]
        _measure(outcome, cluster, waiting, by_name, at)
        cluster.advance(at)
        while events and events[0][0] == at:
            _at, arrives, name = heapq.heappop(events)
            if arrives:
                waiting[name] = _request(by_name[name])
            else:
                cluster.end(name)
        if not waiting:
            continue
        outcome.asked += 1
        for placement in decide(cluster, list(waiting.values())):
            name = placement.instance_id
            cluster.place(placement, waiting.pop(name))
            outcome.started.append(Started(by_name[name], at - by_name[name].arrives_at))
            heapq.heappush(events, (at + by_name[name].runs_s, 0, name))
    outcome.never = len(waiting)
    return outcome


def _measure(
    outcome: Outcome, cluster: Cluster, waiting: dict[str, Request], by_name: dict[str, Task], until: float
) -> None:
    if (seconds := until - cluster.now) <= 0:
        return
    held = {project: gpus for project, (gpus, _cpus, _memory) in cluster.held.items() if gpus}
    wanted: dict[str, float] = defaultdict(float, held)
    for name in waiting:
        task = by_name[name]
        wanted[task.project] += task.gpus * task.gpu_milli / 1000
    outcome.intervals.append(Interval(seconds, held, dict(wanted)))


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


def _request(task: Task) -> Request:
    return Request(
        instance_id=task.name, queued_at=task.arrives_at, gpu_count=task.gpus, gpu_models=(),
        gpu_min_memory_mib=None, cpu_milli=task.cpu_milli, memory_mib=task.memory_mib, node_selector={},
        project_id=task.project, gpu_milli=task.gpu_milli, max_duration_s=task.declared_s,
    )  # fmt: skip
