"""A month of work: the trace's last thirty days of arrivals and durations, and nodes that it nearly fills.

The trace knows neither projects nor declared durations. Projects are drawn for bursts of arrivals, since
people submit many tasks at a time, a few of them most; declared durations are the true ones times what people
usually add (Mu'alem and Feitelson, 2001, find users asking for several times what they need).
"""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

DAY_S = 86_400
MONTH_S = 30 * DAY_S
PROJECTS = 8
_MEAN_BURST = 20
_DECLARED_TIMES = (1.0, 1.5, 2.0, 3.0, 5.0)
_DECLARED_STEP_S = 600
_JITTER_S = 3600


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the month; times in seconds from its beginning."""

    name: str
    project: str
    arrives_at: float
    runs_s: float
    declared_s: int | None
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int  # of each


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


def month(pods: Path, times: int, seed: int, undeclared: float, longest_s: float) -> list[Task]:
    """The tasks in the order of their arrival.

    Args:
        times: how often each recorded task arrives, each time within an hour of the recorded moment, so that
            the bursts stay what they are.
        undeclared: the part of the tasks that declare no duration: they may run for ever.
        longest_s: what ran longer ends then, as where a queue is kept fair: 0.7 % of the trace's tasks run
            for more than a day, some for months, and have 69 % of the GPUs' time. No order helps whom
            they keep waiting.
    """
    rows = sorted(_rows(pods), key=lambda row: (int(row["creation_time"]), row["name"]))
    begin = max(int(row["creation_time"]) for row in rows) - MONTH_S
    dice = random.Random(seed)
    recorded = [row for row in rows if int(row["creation_time"]) >= begin]
    arrivals = sorted(
        (
            max(0.0, int(row["creation_time"]) - begin + dice.uniform(-_JITTER_S, _JITTER_S)),
            copy,
            row["name"],
            row,
        )
        for copy in range(times)
        for row in recorded
    )
    projects = _bursts(dice)
    tasks = []
    for at, copy, name, row in arrivals:
        runs_s = min(longest_s, max(1.0, float(int(row["deletion_time"]) - int(row["creation_time"]))))
        declared = min(longest_s, runs_s * dice.choice(_DECLARED_TIMES))
        declared = inf if dice.random() < undeclared else declared
        tasks.append(_task(f"{name}-{copy}", next(projects), at, row, runs_s, declared))
    return tasks


def machines(nodes: Path, tasks: Sequence[Task], load: float, seed: int) -> list[Machine]:
    """So many of the trace's nodes that the month's tasks ask for `load` of their GPUs' time."""
    wanted = sum(task.runs_s * task.gpus * task.gpu_milli / 1000 for task in tasks) / MONTH_S / load
    all_of_them = [
        Machine(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
        for row in _rows(nodes)
    ]
    dice = random.Random(seed)
    dice.shuffle(all_of_them)
    # Two that could take any of the tasks come first, so that each is possible, and not only just.
    large = [machine for machine in all_of_them if all(_takes(machine, task) for task in tasks)][:2]
    chosen, gpus = [], 0
    for machine in [*large, *(machine for machine in all_of_them if machine not in large)]:
        if gpus >= wanted:
            break
        chosen.append(machine)
        gpus += machine.gpus
    return chosen


def _takes(machine: Machine, task: Task) -> bool:
    rest = machine.cpu_milli >= task.cpu_milli and machine.memory_mib * 0.98 >= task.memory_mib
    return rest and machine.gpus >= task.gpus


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _bursts(dice: random.Random) -> Iterator[str]:
    """Project after project: each burst is of one, and the first of them have the most bursts (1/rank)."""
    names = [f"project-{rank}" for rank in range(1, PROJECTS + 1)]
    weights = [1 / rank for rank in range(1, PROJECTS + 1)]
    while True:
        (project,) = dice.choices(names, weights)
        for _ in range(1 + int(dice.expovariate(1 / _MEAN_BURST))):
            yield project


def _task(name: str, project: str, at: float, row: dict[str, str], runs_s: float, declared: float) -> Task:
    steps = -int(-declared // _DECLARED_STEP_S) if isfinite(declared) else None
    return Task(
        name=name,
        project=project,
        arrives_at=at,
        runs_s=runs_s,
        declared_s=None if steps is None else steps * _DECLARED_STEP_S,
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
        gpus=int(row["num_gpu"]),
        gpu_milli=int(row["gpu_milli"]) if int(row["num_gpu"]) == 1 else 1000,
    )
