"""Other policies under the same protocol: FGD as published, best fit, and chance."""

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
    rests: list[int]

    def takes(self, task: Task) -> bool:
        return self.cpu_milli >= task.cpu_milli and self.memory_mib >= task.memory_mib


Option = tuple[int, ...]  # GPUs to give
# What is left: CPUs and rests of a node of a model.
State = tuple[str, int, tuple[int, ...]]
Target = tuple[int, int, int, tuple[str, ...]]


def options(node: Node, task: Task) -> Iterator[Option]:
    """The ways to give a node's GPUs to a task: each GPU with enough for a share, the first whole ones."""
    if not node.takes(task) or (task.models and node.machine.model not in task.models):
        return
    if task.gpus == 1 and task.gpu_milli < 1000:
        for gpu, rest in enumerate(node.rests):
            if rest >= task.gpu_milli and rest not in node.rests[:gpu]:
                yield (gpu,)
        return
    free = [gpu for gpu, rest in enumerate(node.rests) if rest == 1000]
    if len(free) >= task.gpus:
        yield tuple(free[: task.gpus])


class Peer:
    """Gives each task to the node with the highest score, the first of equals; scores are kept by node."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.nodes = [Node(each, each.cpu_milli, each.memory_mib, [1000] * each.gpus) for each in machines]
        self._version = [0] * len(self.nodes)
        self._kept: dict[Task, list[tuple[int, float, Option]]] = {}

    def score(self, node: Node, task: Task, option: Option) -> float:
        raise NotImplementedError

    def place(self, task: Task) -> tuple[int, Option] | None:
        shape = Task("", task.cpu_milli, task.memory_mib, task.gpus, task.gpu_milli, task.models)
        kept = self._kept.setdefault(shape, [(-1, 0.0, ())] * len(self.nodes))
        best, best_score = -1, float("-inf")
        for index, version in enumerate(self._version):
            if kept[index][0] != version:
                score, option = self._best(index, task)
                kept[index] = version, score, option
            if kept[index][1] > best_score:
                best, best_score = index, kept[index][1]
        if best < 0:
            return None
        option = kept[best][2]
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
            node.rests[gpu] -= task.gpu_milli
        self._version[index] += 1


class BestFit(Peer):
    """The least left over: CPUs, memory and GPUs, each as a part of the largest node's."""

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
            sum(node.rests) - task.milli,
        )
        tightness = -node.rests[option[0]] / 1e6 if option else 0.0
        return tightness - sum(part / most for part, most in zip(left, self._most, strict=True))


class Chance(Peer):
    """Any node and any GPU that will do."""

    def __init__(self, machines: Sequence[Machine], seed: int) -> None:
        super().__init__(machines)
        self._dice = random.Random(seed)

    def place(self, task: Task) -> tuple[int, Option] | None:
        found = [(index, option) for index, node in enumerate(self.nodes) for option in options(node, task)]
        if not found:
            return None
        index, option = self._dice.choice(found)
        self._take(index, task, option)
        return index, option


class Fgd(Peer):
    """Fragmentation gradient descent, with the whole list known beforehand, as its authors run it."""

    def __init__(self, machines: Sequence[Machine], tasks: Sequence[Task]) -> None:
        super().__init__(machines)
        self._targets = typical(tasks)
        self._fragments: dict[State, float] = {}

    def score(self, node: Node, task: Task, option: Option) -> float:
        rests = list(node.rests)
        for gpu in option:
            rests[gpu] -= task.gpu_milli
        before = self._fragment(node.machine.model, node.cpu_milli, node.rests)
        after = self._fragment(node.machine.model, node.cpu_milli - task.cpu_milli, rests)
        return int(100 / (1 + exp((after - before) / 1000)))

    def _fragment(self, model: str, cpu_milli: int, rests: Sequence[int]) -> float:
        state = model, cpu_milli, tuple(sorted(rests))
        if state not in self._fragments:
            self._fragments[state] = sum(
                weight * _fragment(state, target) for target, weight in self._targets
            )
        return self._fragments[state]


def typical(tasks: Sequence[Task]) -> list[tuple[Target, float]]:
    """The most frequent tasks up to 95 % of all, and the part that each is of those."""
    counts = Counter((task.cpu_milli, task.gpus, task.gpu_milli, task.models) for task in tasks)
    found: list[tuple[Target, int]] = []
    for target, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if sum(number for _target, number in found) >= 0.95 * len(tasks):
            break
        found.append((target, count))
    total = sum(count for _target, count in found)
    return [(target, count / total) for target, count in found]


def _fragment(state: State, target: Target) -> int:
    """What a target cannot use: all of a node that cannot host it, else the rests too small for it."""
    model, cpu_free, rests = state
    cpu_milli, gpus, milli, models = target
    enough = sum(rest >= milli for rest in rests)
    if not gpus or cpu_free < cpu_milli or (models and model not in models) or enough < gpus:
        return sum(rests)
    return sum(rest for rest in rests if rest < milli)


def peer(name: str, seed: int) -> Callable[[Sequence[Machine], Sequence[Task]], Peer]:
    """Args: name: fgd, best-fit or random."""
    return {
        "fgd": Fgd,
        "best-fit": lambda machines, tasks: BestFit(machines),
        "random": lambda machines, tasks: Chance(machines, seed),
    }[name]
