"""States of nodes, each held once: two nodes of a class with the same left over are one state."""

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
    """Some states as arrays, one row each. A GPU that is not there has nothing left: its column is 0."""

    kinds: Ints  # index of the class
    cpu_milli: Ints
    rests: Ints  # of the GPUs, thousandths; within a model lowest first

    def __len__(self) -> int:
        return len(self.kinds)

    def rows(self, rows: Ints) -> "States":
        return States(self.kinds[rows], self.cpu_milli[rows], self.rests[rows])

    def joined(self, other: "States") -> "States":
        """These, and the others below them."""
        return States(
            np.concatenate([self.kinds, other.kinds]),
            np.concatenate([self.cpu_milli, other.cpu_milli]),
            np.concatenate([self.rests, other.rests]),
        )


class ClassStates:
    """A class of nodes, and where GPUs of each model stand in its states."""

    __slots__ = ("group", "groups", "order", "size", "value")

    def __init__(self, value: NodeClass) -> None:
        self.value = value
        sizes = value.sizes or (0,) * len(value.models)
        self.size = min(sizes, default=0)  # its smallest GPU's
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

    def sorted(self, rests: Sequence[int]) -> tuple[int, ...]:
        """The rests of a node's GPUs in the order of a state."""
        if len(self.groups) == 1:
            return tuple(sorted(rests))
        by_model = [rests[place] for place in self.order]
        return tuple(rest for group in self.groups.values() for rest in sorted(by_model[group]))


class StateTable:
    """Numbers for states, in order of appearance. Rows are never changed, and forgotten only all at once."""

    def __init__(self) -> None:
        self.kinds: list[ClassStates] = []
        self.classes: list[NodeClass] = []  # of each kind
        self.width = 1  # columns of `rests`: the most GPUs on a node
        self._kind_numbers: dict[NodeClass, int] = {}
        self._numbers: dict[Key, int] = {}
        self._kind = np.zeros(1024, np.int64)
        self._cpu = np.zeros(1024, np.int64)
        self._rests = np.zeros((1024, 1), np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def capacity(self) -> int:
        return len(self._kind)

    def kind(self, value: NodeClass) -> int:
        """The number of a class, which is new if it was not known."""
        number = self._kind_numbers.get(value)
        if number is None:
            number = self._kind_numbers[value] = len(self.kinds)
            self.kinds.append(ClassStates(value))
            self.classes.append(value)
            self._widen(len(value.models))
        return number

    def number(self, kind: int, cpu_milli: int, rests: Sequence[int]) -> int:
        """The number of a state; `rests` by the GPUs' places on the node, and below 0 where closed."""
        key = (kind, cpu_milli, self.kinds[kind].sorted(rests))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._write(number, key)
        return number

    def states(self, numbers: Ints) -> States:
        return States(self._kind[numbers], self._cpu[numbers], self._rests[numbers])

    def clear(self) -> None:
        """Forget the states, not the classes."""
        self._numbers.clear()

    def _write(self, number: int, key: Key) -> None:
        if number == self.capacity:
            self._kind = np.concatenate([self._kind, np.zeros_like(self._kind)])
            self._cpu = np.concatenate([self._cpu, np.zeros_like(self._cpu)])
            self._rests = np.concatenate([self._rests, np.zeros_like(self._rests)])
        kind, cpu_milli, rests = key
        self._kind[number] = kind
        self._cpu[number] = cpu_milli
        self._rests[number] = 0
        self._rests[number, : len(rests)] = rests

    def _widen(self, gpus: int) -> None:
        if gpus > self.width:
            more = np.zeros((self.capacity, gpus - self.width), np.int64)
            self._rests = np.concatenate([self._rests, more], axis=1)
            self.width = gpus
