"""Other policies for the same tasks and nodes: FGD as published, best fit, and random."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp

from benchmarks.trace import Machine, Task


@dataclass(slots=True)
class Node:
    machine: Machine
    cpu_milli: int
    memory_mib: int
    gpu_free: list[int]

    def has_room(self, task: Task) -> bool:
        return self.cpu_milli >= task.cpu_milli and self.memory_mib >= task.memory_mib


Option = tuple[int, ...]  # GPUs to allocate
# The GPU model of a node, its free CPUs (milli), and what is free per GPU.
State = tuple[str, int, tuple[int, ...]]
Target = tuple[int, int, int, tuple[str, ...]]  # of a task: CPUs (milli), GPUs, thousandths of each, models


def options(node: Node, task: Task) -> Iterator[Option]:
    """The possible allocations on a node: any GPU with enough free for a share, or the first whole GPUs."""
    if not node.has_room(task) or (task.models and node.machine.model not in task.models):
        return
    if task.gpus == 1 and task.gpu_milli < 1000:
        for gpu, free in enumerate(node.gpu_free):
            if free >= task.gpu_milli and free not in node.gpu_free[:gpu]:
                yield (gpu,)
        return
    whole = [gpu for gpu, free in enumerate(node.gpu_free) if free == 1000]
    if len(whole) >= task.gpus:
        yield tuple(whole[: task.gpus])


class Peer:
    """Places each task on the node with the highest score, the first of equals. Scores are cached by node."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.nodes = [Node(each, each.cpu_milli, each.memory_mib, [1000] * each.gpus) for each in machines]
        self._version = [0] * len(self.nodes)
        self._cached: dict[Task, list[tuple[int, float, Option]]] = {}

    def score(self, node: Node, task: Task, option: Option) -> float:
        raise NotImplementedError

    def place(self, task: Task) -> tuple[int, Option] | None:
        shape = Task("", task.cpu_milli, task.memory_mib, task.gpus, task.gpu_milli, task.models)
        cached = self._cached.setdefault(shape, [(-1, 0.0, ())] * len(self.nodes))
        best, best_score = -1, float("-inf")
        for index, version in enumerate(self._version):
            if cached[index][0] != version:
                score, option = self._best(index, task)
                cached[index] = version, score, option
            if cached[index][1] > best_score:
                best, best_score = index, cached[index][1]
        if best < 0:
            return None
        option = cached[best][2]
        self._take(best, task, option)
        return best, option

    def _best(self, index: int, task: Task) -> tuple[float, Option]:
        best: tuple[float, Option] = (float("-inf"), ())
        for option in options(self.nodes[index], task):
            score = self.score(self.nodes[index], task, option)
            if score > best[0]:
                best = score, option
        return best

    def _take(self, index: int, task: Task, option: Option) -> None:
        node = self.nodes[index]
        node.cpu_milli -= task.cpu_milli
        node.memory_mib -= task.memory_mib
        for gpu in option:
            node.gpu_free[gpu] -= task.gpu_milli
        self._version[index] += 1


class BestFit(Peer):
    """The node with the least left free: CPUs, memory and GPUs, each relative to the largest node."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        super().__init__(machines)
        self._most = (
            max(each.cpu_milli for each in machines),
            max(each.memory_mib for each in machines),
            max(1, *(1000 * each.gpus for each in machines)),
        )

    def score(self, node: Node, task: Task, option: Option) -> float:
        left = (
            node.cpu_milli - task.cpu_milli,
            node.memory_mib - task.memory_mib,
            sum(node.gpu_free) - task.milli,
        )
        tightness = -node.gpu_free[option[0]] / 1e6 if option else 0.0
        return tightness - sum(part / most for part, most in zip(left, self._most, strict=True))


class Random(Peer):
    """A random node and GPU of those that fit."""

    def __init__(self, machines: Sequence[Machine], seed: int) -> None:
        super().__init__(machines)
        self._random = random.Random(seed)

    def place(self, task: Task) -> tuple[int, Option] | None:
        found = [(index, option) for index, node in enumerate(self.nodes) for option in options(node, task)]
        if not found:
            return None
        index, option = self._random.choice(found)
        self._take(index, task, option)
        return index, option


class Fgd(Peer):
    """Fragmentation gradient descent with the whole task list known in advance, as its authors run it."""

    def __init__(self, machines: Sequence[Machine], tasks: Sequence[Task]) -> None:
        super().__init__(machines)
        self._targets = typical(tasks)
        self._fragments: dict[State, float] = {}

    def score(self, node: Node, task: Task, option: Option) -> float:
        gpu_free = list(node.gpu_free)
        for gpu in option:
            gpu_free[gpu] -= task.gpu_milli
        before = self._fragment(node.machine.model, node.cpu_milli, node.gpu_free)
        after = self._fragment(node.machine.model, node.cpu_milli - task.cpu_milli, gpu_free)
        return int(100 / (1 + exp((after - before) / 1000)))

    def _fragment(self, model: str, cpu_milli: int, gpu_free: Sequence[int]) -> float:
        state = model, cpu_milli, tuple(sorted(gpu_free))
        if state not in self._fragments:
            self._fragments[state] = sum(
                weight * _fragment(state, target) for target, weight in self._targets
            )
        return self._fragments[state]


def typical(tasks: Sequence[Task]) -> list[tuple[Target, float]]:
    """The most frequent tasks that together are 95 % of all, with their fractions of these."""
    counts = Counter((task.cpu_milli, task.gpus, task.gpu_milli, task.models) for task in tasks)
    found: list[tuple[Target, int]] = []
    for target, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if sum(number for _target, number in found) >= 0.95 * len(tasks):
            break
        found.append((target, count))
    total = sum(count for _target, count in found)
    return [(target, count / total) for target, count in found]


def _fragment(state: State, target: Target) -> int:
    """What a target cannot use: all that is free on a node that cannot host it, else only too small parts."""
    model, cpu_free, gpu_free = state
    cpu_milli, gpus, milli, models = target
    enough = sum(free >= milli for free in gpu_free)
    if not gpus or cpu_free < cpu_milli or (models and model not in models) or enough < gpus:
        return sum(gpu_free)
    return sum(free for free in gpu_free if free < milli)


def peer(name: str, seed: int) -> Callable[[Sequence[Machine], Sequence[Task]], Peer]:
    """Args: name: fgd, best-fit or random."""
    return {
        "fgd": Fgd,
        "best-fit": lambda machines, tasks: BestFit(machines),
        "random": lambda machines, tasks: Random(machines, seed),
    }[name]
