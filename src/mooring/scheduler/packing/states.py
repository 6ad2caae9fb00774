"""Node states, each stored once: nodes of one class with the same free resources share a state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooring.scheduler.packing.shapes import NodeClass

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Key = tuple[int, int, tuple[int, ...]]  # number of the class, free CPUs, free per GPU


@dataclass(frozen=True, slots=True)
class States:
    """States as arrays, one row each. Columns of GPUs that a node does not have are 0."""

    classes: Ints  # numbers in the table
    cpu_milli: Ints
    gpu_free: Ints  # thousandths, ascending within a model; negated if closed

    def __len__(self) -> int:
        return len(self.classes)

    def rows(self, rows: Ints) -> "States":
        return States(self.classes[rows], self.cpu_milli[rows], self.gpu_free[rows])

    def joined(self, other: "States") -> "States":
        return States(
            np.concatenate([self.classes, other.classes]),
            np.concatenate([self.cpu_milli, other.cpu_milli]),
            np.concatenate([self.gpu_free, other.gpu_free]),
        )


class ClassLayout:
    """A node class, and the positions of its GPUs in states: by model, the smallest first."""

    __slots__ = ("group", "groups", "node_class", "order", "size")

    def __init__(self, node_class: NodeClass) -> None:
        self.node_class = node_class
        models_by_place = node_class.models
        sizes = node_class.sizes or (0,) * len(models_by_place)
        self.size = min(sizes, default=0)  # of its smallest GPU
        smallest: dict[str, int] = {}
        for model, size in zip(models_by_place, sizes, strict=True):
            smallest[model] = min(size, smallest.get(model, size))
        models = sorted(smallest, key=lambda model: (smallest[model], model))
        self.group = tuple(models.index(model) for model in models_by_place)  # the smallest model is 0
        self.order = tuple(sorted(range(len(models_by_place)), key=lambda place: (self.group[place], place)))
        self.groups: dict[str, slice] = {}
        for position, place in enumerate(self.order):
            model = models_by_place[place]
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
        self.layouts: list[ClassLayout] = []  # by class number
        self.classes: list[NodeClass] = []  # by class number
        self.width = 1  # the most GPUs on a node
        self._class_numbers: dict[NodeClass, int] = {}
        self._numbers: dict[Key, int] = {}
        self._class = np.zeros(1024, np.int64)
        self._cpu = np.zeros(1024, np.int64)
        self._gpu_free = np.zeros((1024, 1), np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def capacity(self) -> int:
        return len(self._class)

    def class_number(self, node_class: NodeClass) -> int:
        """The number of a class, which is added if it is new."""
        number = self._class_numbers.get(node_class)
        if number is None:
            number = self._class_numbers[node_class] = len(self.layouts)
            self.layouts.append(ClassLayout(node_class))
            self.classes.append(node_class)
            self._widen(len(node_class.models))
        return number

    def number(self, class_number: int, cpu_milli: int, gpu_free: Sequence[int]) -> int:
        """The number of a state; `gpu_free` by place on the node, negated where a GPU is closed."""
        key = (class_number, cpu_milli, self.layouts[class_number].sorted(gpu_free))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._write(number, key)
        return number

    def states(self, numbers: Ints) -> States:
        return States(self._class[numbers], self._cpu[numbers], self._gpu_free[numbers])

    def clear(self) -> None:
        """Drop all states, but not the classes."""
        self._numbers.clear()

    def _write(self, number: int, key: Key) -> None:
        if number == self.capacity:
            self._class = np.concatenate([self._class, np.zeros_like(self._class)])
            self._cpu = np.concatenate([self._cpu, np.zeros_like(self._cpu)])
            self._gpu_free = np.concatenate([self._gpu_free, np.zeros_like(self._gpu_free)])
        self._class[number], self._cpu[number], gpu_free = key
        self._gpu_free[number] = 0
        self._gpu_free[number, : len(gpu_free)] = gpu_free

    def _widen(self, gpus: int) -> None:
        if gpus > self.width:
            more = np.zeros((self.capacity, gpus - self.width), np.int64)
            self._gpu_free = np.concatenate([self._gpu_free, more], axis=1)
            self.width = gpus
