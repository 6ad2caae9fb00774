"""Nodes and tasks in the format of Alibaba's 2023 GPU trace, orders of arrival, and synthetic traces."""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WHERE = """\
The trace is public: openb_node_list_gpu_node.csv and openb_pod_list_*.csv in data/csv of the repository
hkust-adsl/kubernetes-scheduler-simulator on GitHub. This benchmark needs two of them:

  python -m benchmarks.packing --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv

or try `--synthetic`, a small generated trace."""


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int  # per GPU; below 1000: a share of one GPU
    models: tuple[str, ...]  # accepted; empty: any

    @property
    def milli(self) -> int:
        return self.gpus * self.gpu_milli


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded task; times are in seconds from the start of the trace."""

    task: Task
    created_at: int
    scheduled_at: int | None  # None: deleted before it was scheduled
    deleted_at: int


def machines(path: Path) -> list[Machine]:
    return [
        Machine(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
        for row in _rows(path)
    ]


def tasks(path: Path) -> list[Task]:
    return [_task(row) for row in _rows(path)]


def recorded(path: Path) -> list[Recorded]:
    return [
        Recorded(
            _task(row),
            int(row["creation_time"]),
            int(row["scheduled_time"]) if row["scheduled_time"] else None,
            int(row["deletion_time"]),
        )
        for row in _rows(path)
    ]


def arrivals(tasks: Sequence[Task], milli: int, arrive: float, seed: int) -> list[Task]:
    """The tasks in random order, until they request `arrive` times `milli` thousandths of a GPU.

    A list that requests less is offered completely, followed by tasks drawn from it at random. Of a list that
    requests more, a random part is offered, each task once.
    """
    dice = random.Random(seed)
    offered = sorted(tasks, key=lambda task: task.name)
    dice.shuffle(offered)
    pool = list(offered)
    limit = arrive * milli
    requested = sum(task.milli for task in offered)
    if requested > limit:
        return _part(offered, requested - limit, dice)
    while any(task.milli for task in pool):
        task = dice.choice(pool)
        if requested + task.milli > limit:
            break
        offered.append(task)
        requested += task.milli
    return offered


def _part(offered: list[Task], surplus: float, dice: random.Random) -> list[Task]:
    """The tasks without some random ones, which request `surplus` or slightly more."""
    while surplus > 0:
        surplus -= offered.pop(dice.randrange(len(offered))).milli
    return offered


def synthetic(nodes: int, count: int, seed: int = 1) -> tuple[list[Machine], list[Task]]:
    """A cluster and tasks that resemble the trace."""
    dice = random.Random(seed)
    types = [("A", 8, 96_000, 393_216), ("B", 2, 104_000, 524_288), ("C", 4, 32_000, 131_072)]
    fleet = [
        Machine(f"node-{number:05}", cpu, memory, gpus, model)
        for number in range(nodes)
        for model, gpus, cpu, memory in [types[number % len(types)]]
    ]
    shapes = [
        (1, 1000, 8000),
        (1, 1000, 12000),
        (1, 810, 3000),
        (1, 470, 8000),
        (1, 320, 4000),
        (1, 160, 4000),
    ]
    shapes += [(0, 0, 12000), (2, 1000, 16000), (4, 1000, 32000), (8, 1000, 64000)]
    weights = [20, 30, 10, 10, 5, 4, 12, 3, 2, 2]
    made = []
    for number in range(count):
        gpus, milli, cpu = dice.choices(shapes, weights)[0]
        models = (dice.choice("AB"),) if gpus == 1 and dice.random() < 0.1 else ()
        made.append(Task(f"task-{number:05}", cpu, 2 * cpu, gpus, milli, models))
    return fleet, made


def _task(row: dict[str, str]) -> Task:
    """A task from a row of the trace, in which `gpu_spec` is optional."""
    gpus = int(row["num_gpu"])
    models = tuple(sorted(model for model in (row.get("gpu_spec") or "").split("|") if model)) if gpus else ()
    milli = int(row["gpu_milli"]) if gpus else 0
    return Task(row["name"], int(row["cpu_milli"]), int(row["memory_mib"]), gpus, milli, models)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
