"""A month of work: the arrivals and durations of the last thirty days of the trace, and nodes for them.

The trace has neither projects nor declared durations. Each burst of arrivals gets a random project, since
people submit many tasks at a time, and a few people submit most of them. A declared duration is a multiple of
the true one (users request several times what they need: Mu'alem and Feitelson, 2001), rounded up to one of a
few popular values (Tsafrir, Etsion, Feitelson, 2005).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from benchmarks.trace import Machine, Recorded, Task
from mooring.core.node import allocatable_memory_mib

DAY_S = 86_400
MONTH_S = 30 * DAY_S
PROJECTS = 8
_MEAN_BURST = 20
_DECLARED_FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0)
_DECLARED_S = tuple(minutes * 60 for minutes in (10, 30, 60, 120, 240, 480, 720, 1440, 2880, 5760, 10080))
_JITTER_S = 3600
_LARGE_NODES = 2


@dataclass(frozen=True, slots=True)
class Job:
    """A task of the month; times are in seconds from its start."""

    name: str
    project: str
    arrives_at: float
    runs_s: float
    declared_s: int | None
    task: Task


@dataclass(frozen=True, slots=True)
class Assumed:
    """Assumptions that the trace does not contain, and changes to it."""

    times: int = 3  # copies of each recorded task
    longest_s: float = 2.0 * DAY_S  # limit of run times
    undeclared: float = 0.0  # fraction of tasks without a declared duration
    seed: int = 42


def month(recorded: Sequence[Recorded], assumed: Assumed) -> list[Job]:
    """The scheduled tasks of the last thirty days of the trace, in order of arrival.

    Copies of a task arrive within an hour of the recorded time, so that the load per day stays the same. GPU
    models are not requested, since there are only a few nodes.
    """
    dice = random.Random(assumed.seed)
    begin = max(each.created_at for each in recorded) - MONTH_S
    ordered = sorted(recorded, key=lambda each: (each.created_at, each.task.name))
    arrivals = sorted(
        (
            (max(0.0, each.created_at - begin + dice.uniform(-_JITTER_S, _JITTER_S)), copy, each.task, ran_s)
            for copy in range(assumed.times)
            for each in ordered
            if each.created_at >= begin and (ran_s := _ran_s(each)) is not None
        ),
        key=lambda arrival: (arrival[0], arrival[1], arrival[2].name),
    )
    projects = _bursts(dice)
    jobs = []
    for at, copy, task, ran_s in arrivals:
        runs_s = min(assumed.longest_s, ran_s)
        declared_s = _declared_s(runs_s, assumed, dice)
        task_of_any_model = replace(task, models=())
        jobs.append(Job(f"{task.name}-{copy}", next(projects), at, runs_s, declared_s, task_of_any_model))
    return jobs


def nodes_for(jobs: Sequence[Job], machines: Sequence[Machine], load: float, seed: int) -> list[Machine]:
    """Machines such that the jobs request a fraction `load` (or slightly more) of their GPU time.

    The first two can host any of the jobs.
    """
    wanted = gpu_seconds(jobs) / MONTH_S / load
    shuffled = list(machines)
    random.Random(seed).shuffle(shuffled)
    tasks = {job.task for job in jobs}
    large = [machine for machine in shuffled if all(_can_host(machine, task) for task in tasks)][
        :_LARGE_NODES
    ]
    chosen, gpus = [], 0
    for machine in [*large, *(machine for machine in shuffled if machine not in large)]:
        if machine in large or gpus + machine.gpus <= wanted:
            chosen.append(machine)
            gpus += machine.gpus
    return chosen


def gpu_seconds(jobs: Sequence[Job]) -> float:
    return sum(job.runs_s * job.task.milli / 1000 for job in jobs)


def _can_host(machine: Machine, task: Task) -> bool:
    memory = allocatable_memory_mib(machine.memory_mib) >= task.memory_mib
    return memory and machine.cpu_milli >= task.cpu_milli and machine.gpus >= task.gpus


def _ran_s(each: Recorded) -> float | None:
    """For how long the task ran, at least a second; None if it never did."""
    return None if each.scheduled_at is None else max(1.0, each.deleted_at - each.scheduled_at)


def _declared_s(runs_s: float, assumed: Assumed, dice: random.Random) -> int | None:
    guess = runs_s * dice.choice(_DECLARED_FACTORS)
    if dice.random() < assumed.undeclared:
        return None
    return ceil(min(assumed.longest_s, next((value for value in _DECLARED_S if value >= guess), guess)))


def _bursts(dice: random.Random) -> Iterator[str]:
    """Projects in bursts; the number of bursts of a project is proportional to 1/rank."""
    names = [f"project-{rank}" for rank in range(1, PROJECTS + 1)]
    weights = [1 / rank for rank in range(1, PROJECTS + 1)]
    while True:
        (project,) = dice.choices(names, weights)
        for _ in range(1 + int(dice.expovariate(1 / _MEAN_BURST))):
            yield project
