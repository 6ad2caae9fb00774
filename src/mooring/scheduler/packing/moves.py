"""The best move of a shape on each node state, computed once per state."""

import numpy as np

from mooring.scheduler.packing.potential import UNIT, Potential
from mooring.scheduler.packing.shapes import Shape
from mooring.scheduler.packing.states import Bools, Ints, States, StateTable
from mooring_client.schemas.spec import WHOLE_MILLI

NO_FIT = -1
# A step of the score: forty thousandths of a GPU. A fixed node order breaks ties, which fills one node after
# the other. Steps finer than the accuracy of the expectation would spread requests over all nodes.
_STEP = 40 * UNIT
_MIDDLE = 1 << 13  # the score of a move that leaves the waste unchanged
_UNKNOWN = -2
_DEDUPLICATE_ABOVE = 8


class Waste:
    """A potential, with the needs of its targets on the classes of one table."""

    def __init__(self, potential: Potential, table: StateTable) -> None:
        self._potential = potential
        self._table = table
        self._known = 0  # classes of which the needs are known
        self._needs = potential.needs(())

    def of(self, states: States) -> Ints:
        """As `Potential.of`, for states of this table."""
        if self._known < len(self._table.classes):
            self._known = len(self._table.classes)
            self._needs = self._potential.needs(self._table.classes)
        return self._potential.of(states, self._needs)


class Moves:
    """One shape's best move on every state of a table.

    Memory is left out: it changes with every placement, so nearly every state would be new. The owner is left
    out too: the state marks the GPUs that an owner may not use.
    """

    def __init__(self, shape: Shape, table: StateTable, waste: Waste) -> None:
        self._shape = shape
        self._table = table
        self._waste = waste
        self._scores = np.full(table.capacity, _UNKNOWN, np.int64)
        self._positions = np.zeros(table.capacity, np.int16)  # a share's GPU, or the group of whole GPUs
        self._cpu = np.zeros(0, np.int64)  # milli needed, by class
        self._allowed = np.zeros((0, table.width), np.bool_)  # GPUs of an accepted model, by class
        self._groups = np.zeros((0, table.width), np.int64)  # the model's number within its class
        self.add_classes()

    def add_classes(self) -> None:
        """Add the classes that are new in the table."""
        layouts = self._table.layouts
        if len(self._cpu) == len(layouts):
            return
        self._cpu = np.array([self._shape.takes(layout.node_class)[0] for layout in layouts], np.int64)
        self._allowed = np.zeros((len(layouts), self._table.width), np.bool_)
        self._groups = np.zeros((len(layouts), self._table.width), np.int64)
        for number, layout in enumerate(layouts):
            for group, (model, positions) in enumerate(layout.groups.items()):
                self._allowed[number, positions] = not self._shape.models or model in self._shape.models
                self._groups[number, positions] = group

    def scores(self, numbers: Ints) -> Ints:
        """The score of the best move in each of these states; `NO_FIT` if there is none."""
        if len(self._scores) < self._table.capacity:
            more = self._table.capacity - len(self._scores)
            self._scores = np.concatenate([self._scores, np.full(more, _UNKNOWN, np.int64)])
            self._positions = np.concatenate([self._positions, np.zeros(more, np.int16)])
        scores = self._scores[numbers]
        unknown = scores == _UNKNOWN
        if unknown.any():
            # For a few, removing duplicates takes longer than computing them twice.
            missing = numbers[unknown]
            self._compute(np.unique(missing) if len(missing) > _DEDUPLICATE_ABOVE else missing)
            scores = self._scores[numbers]
        return scores

    def positions(self, number: int) -> tuple[int, ...]:
        """The positions of the GPUs of the best move, in a state where the shape fits."""
        if not self._shape.gpus:
            return ()
        first = int(self._positions[number])
        if self._shape.share:
            return (first,)
        states = self._table.states(np.array([number]))
        usable = self._usable(states)[0] & (self._groups[int(states.classes[0])] == first)
        return tuple(int(position) for position in np.flatnonzero(usable)[: self._shape.gpus])

    def _compute(self, numbers: Ints) -> None:
        states = self._table.states(numbers)
        self._scores[numbers] = NO_FIT
        origins, gpu_free, positions = self._alternatives(states)
        if not len(origins):
            return
        classes = states.classes[origins]
        after = States(classes, states.cpu_milli[origins] - self._cpu[classes], gpu_free)
        waste = self._waste.of(states.joined(after))
        scores = score(waste[origins] - waste[len(states) :])
        # Later writes overwrite: write by ascending score, and of equal scores the first alternative last.
        order = len(scores) - 1 - np.argsort(scores[::-1], kind="stable")
        chosen = numbers[origins[order]]
        self._scores[chosen] = scores[order]
        self._positions[chosen] = positions[order]

    def _alternatives(self, states: States) -> tuple[Ints, Ints, Ints]:
        """Each possible move: its row in `states`, what is then free per GPU, its entry of `_positions`."""
        shape = self._shape
        enough_cpu = states.cpu_milli >= self._cpu[states.classes]
        gpu_free = np.abs(states.gpu_free)
        if not shape.gpus:
            origins = np.flatnonzero(enough_cpu)
            return origins, gpu_free[origins], np.zeros(len(origins), np.int64)
        usable = self._usable(states) & enough_cpu[:, None]
        if shape.share:
            # GPUs of a model are sorted by what is free: of equal ones, only the first is tried.
            duplicate = states.gpu_free[:, 1:] == states.gpu_free[:, :-1]
            usable[:, 1:] &= ~(duplicate & usable[:, :-1])
            origins, positions = np.nonzero(usable)
            after = gpu_free[origins]
            after[np.arange(len(origins)), positions] -= shape.gpu_milli
            return origins, after, positions
        groups = self._groups[states.classes]
        last = int(groups.max())
        if last == 0:
            return self._whole_gpus(gpu_free, usable, 0)
        found = [self._whole_gpus(gpu_free, usable & (groups == group), group) for group in range(last + 1)]
        origins, after, which = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return origins, after, which

    def _whole_gpus(self, gpu_free: Ints, usable: Bools, group: int) -> tuple[Ints, Ints, Ints]:
        """The first free GPUs of a model: they are interchangeable."""
        allocated = usable & (usable.cumsum(axis=1) <= self._shape.gpus)
        origins = np.flatnonzero(allocated.sum(axis=1) == self._shape.gpus)
        return origins, np.where(allocated[origins], 0, gpu_free[origins]), np.full(len(origins), group)

    def _usable(self, states: States) -> Bools:
        """The GPUs of an accepted model that have enough free; what is free of a closed GPU is negative."""
        needed = self._shape.gpu_milli if self._shape.share else WHOLE_MILLI
        usable: Bools = (states.gpu_free >= needed) & self._allowed[states.classes]
        return usable


def score(saved: Ints) -> Ints:
    """The reduction of waste in whole steps, shifted to be at least 0."""
    return np.clip(_MIDDLE + (saved + _STEP // 2) // _STEP, 0, 2 * _MIDDLE)
