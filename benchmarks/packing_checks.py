"""Checks placements against the rules, without code of the scheduler or of the other policies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.trace import Machine, Task


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of a task; without a node, it was dropped."""

    node: str
    gpus: tuple[int, ...]


def broken_rules(
    machines: Sequence[Machine], offered: Sequence[Task], placed: Sequence[Placed]
) -> Iterator[str]:
    """A message per broken rule.

    Raises:
        ValueError: the numbers of tasks and placements differ.
    """
    where = {machine.name: index for index, machine in enumerate(machines)}
    cpu = [machine.cpu_milli for machine in machines]
    memory = [machine.memory_mib for machine in machines]
    gpus = [[1000] * machine.gpus for machine in machines]
    for number, (task, placement) in enumerate(zip(offered, placed, strict=True)):
        if not placement.node:
            for index, machine in enumerate(machines):
                if _has_room(task, machine, cpu[index], memory[index], gpus[index]):
                    yield f"offer {number} ({task.name}) was dropped and fits {machine.name}"
                    break
            continue
        index = where[placement.node]
        cpu[index] -= task.cpu_milli
        memory[index] -= task.memory_mib
        if len(set(placement.gpus)) != task.gpus or not set(placement.gpus) <= set(range(len(gpus[index]))):
            yield f"offer {number} ({task.name}) wanted {task.gpus} GPUs and got {placement.gpus}"
            continue
        for gpu in placement.gpus:
            gpus[index][gpu] -= task.gpu_milli
        if task.models and machines[index].model not in task.models:
            yield f"offer {number} ({task.name}) wanted {task.models} and got {machines[index].model}"
        if min(cpu[index], memory[index], *gpus[index], 0) < 0:
            yield f"offer {number} ({task.name}) is more than {placement.node} had"


def _has_room(task: Task, machine: Machine, cpu_milli: int, memory_mib: int, gpus: Sequence[int]) -> bool:
    if cpu_milli < task.cpu_milli or memory_mib < task.memory_mib:
        return False
    if task.models and machine.model not in task.models:
        return False
    return sum(free >= task.gpu_milli for free in gpus) >= task.gpus
