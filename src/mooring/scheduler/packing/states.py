"""Node states, each stored once: nodes of one class with the same free resources share a state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooring.scheduler.packing.shapes import NodeClass

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Key = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class States:
    """States as arrays, one row each. Columns of GPUs that a node does not have are 0."""

    kinds: Ints  # index of the class
    cpu_milli: Ints
    gpu_free: Ints  # thousandths, ascending within a model; negated if closed

    def __len__(self) -> int:
        return len(self.kinds)

    def rows(self, rows: Ints) -> "States":
        return States(self.kinds[rows], self.cpu_milli[rows], self.gpu_free[rows])

    def joined(self, other: "States") -> "States":
        return States(
            np.concatenate([self.kinds, other.kinds]),
            np.concatenate([self.cpu_milli, other.cpu_milli]),
            np.concatenate([self.gpu_free, other.gpu_free]),
        )


class ClassStates:
    """A node class, and the positions of its GPUs in states: by model, the smallest first."""

    __slots__ = ("group", "groups", "order", "size", "value")

    def __init__(self, value: NodeClass) -> None:
        self.value = value
        sizes = value.sizes or (0,) * len(value.models)
        self.size = min(sizes, default=0)  # of its smallest GPU
        smallest: dict[str, int] = {}
        for model, size in zip(value.models, sizes, strict=True):
            smallest[model] = min(size, smallest.get(model, size))
        models = sorted(smallest, key=lambda model: (smallest[model], model))
        self.group = tuple(models.index(model) for model in value.models)  # by place; the smallest model is 0
        self.order = tuple(sorted(range(len(value.models)), key=lambda place: (self.group[place], place)))
        self.groups: dict[str, slice] = {}
        for position, place in enumerate(self.order):
            model = value.models[place]
            first = self.groups[model].start if model in self.groups else position
            self.groups[model] = slice(first, position + 1)

    def sorted(self, gpu_free: Sequence[int]) -> tuple[int, ...]:
        """What is free per GPU, in the order of a state."""
        if len(self.groups) == 1:
            return tuple(sorted(gpu_free))
        by_model = [gpu_free[place] for place in self.order]
        return tuple(free for group in self.groups.values() for free in sorted(by_model[group]))


class StateTable:
    """Assigns numbers to states. Rows never change, and are dropped only all at once."""

    def __init__(self) -> None:
        self.kinds: list[ClassStates] = []
        self.classes: list[NodeClass] = []  # of each kind
        self.width = 1  # the most GPUs on a node
        self._kind_numbers: dict[NodeClass, int] = {}
        self._numbers: dict[Key, int] = {}
        self._kind = np.zeros(1024, np.int64)
        self._cpu = np.zeros(1024, np.int64)
        self._gpu_free = np.zeros((1024, 1), np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def capacity(self) -> int:
        return len(self._kind)

    def kind(self, value: NodeClass) -> int:
        """The number of a class, which is added if it is new."""
        number = self._kind_numbers.get(value)
        if number is None:
            number = self._kind_numbers[value] = len(self.kinds)
            self.kinds.append(ClassStates(value))
            self.classes.append(value)
            self._widen(len(value.models))
        return number

    def number(self, kind: int, cpu_milli: int, gpu_free: Sequence[int]) -> int:
        """The number of a state; `gpu_free` by place on the node, negated where a GPU is closed."""
        key = (kind, cpu_milli, self.kinds[kind].sorted(gpu_free))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._write(number, key)
        return number

    def states(self, numbers: Ints) -> States:
        return States(self._kind[numbers], self._cpu[numbers], self._gpu_free[numbers])

    def clear(self) -> None:
        """Drop all states, but not the classes."""
        self._numbers.clear()

    def _write(self, number: int, key: Key) -> None:
        if number == self.capacity:
            self._kind = np.concatenate([self._kind, np.zeros_like(self._kind)])
            self._cpu = np.concatenate([self._cpu, np.zeros_like(self._cpu)])
            self._gpu_free = np.concatenate([self._gpu_free, np.zeros_like(self._gpu_free)])
        kind, cpu_milli, gpu_free = key
        self._kind[number] = kind
        self._cpu[number] = cpu_milli
        self._gpu_free[number] = 0
        self._gpu_free[number, : len(gpu_free)] = gpu_free

    def _widen(self, gpus: int) -> None:
        if gpus > self.width:
            more = np.zeros((self.capacity, gpus - self.width), np.int64)
            self._gpu_free = np.concatenate([self._gpu_free, more], axis=1)
            self.width = gpus
