"""What a request could do to a state, and how good the best of it is; known once for every state."""

import numpy as np

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.packing.potential import UNIT, Potential
from mooring.scheduler.packing.shapes import Shape
from mooring.scheduler.packing.states import Bools, Ints, States, StateTable

NO_FIT = -1
# Forty thousandths of a GPU. Equal moves go by a fixed order of nodes, which fills one node after the other;
# finer differences than the expectation is good for would spread what comes over all of them.
_STEP = 40 * UNIT
_MIDDLE = 1 << 13
_UNKNOWN = -2
_FEW = 8


class Waste:
    """A potential, and what it needs to know of the classes of one table."""

    def __init__(self, potential: Potential, table: StateTable) -> None:
        self._potential = potential
        self._table = table
        self._known = 0  # classes
        self._needs = potential.needs(())

    def of(self, states: States) -> Ints:
        """As `Potential.of`, of states of this table."""
        if self._known < len(self._table.classes):
            self._known = len(self._table.classes)
            self._needs = self._potential.needs(self._table.classes)
        return self._potential.of(states, self._needs)


class Moves:
    """One shape's best move on every state of a table.

    Memory is left out: it changes with every placement, and would make nearly every state a new one. So is
    the owner, whose state has those GPUs closed that he may not be given.
    """

    def __init__(self, shape: Shape, table: StateTable, waste: Waste) -> None:
        self._shape = shape
        self._table = table
        self._waste = waste
        self._scores = np.full(table.capacity, _UNKNOWN, np.int64)
        self._positions = np.zeros(table.capacity, np.int16)
        self._cpu = np.zeros(0, np.int64)
        self._allowed = np.zeros((0, table.width), np.bool_)  # GPUs of a model that will do, by class
        self._groups = np.zeros((0, table.width), np.int64)  # a number for each model of a class
        self.meet_kinds()

    def meet_kinds(self) -> None:
        """The table knows further classes."""
        kinds = self._table.kinds
        if len(self._cpu) == len(kinds):
            return
        self._cpu = np.array([self._shape.takes(kind.value)[0] for kind in kinds], np.int64)
        self._allowed = np.zeros((len(kinds), self._table.width), np.bool_)
        self._groups = np.zeros((len(kinds), self._table.width), np.int64)
        for number, kind in enumerate(kinds):
            for group, (model, positions) in enumerate(kind.groups.items()):
                self._allowed[number, positions] = not self._shape.models or model in self._shape.models
                self._groups[number, positions] = group

    def scores(self, numbers: Ints) -> Ints:
        """How good the best move is in each of these states; `NO_FIT` where there is none."""
        if len(self._scores) < self._table.capacity:
            more = self._table.capacity - len(self._scores)
            self._scores = np.concatenate([self._scores, np.full(more, _UNKNOWN, np.int64)])
            self._positions = np.concatenate([self._positions, np.zeros(more, np.int16)])
        scores = self._scores[numbers]
        unknown = scores == _UNKNOWN
        if unknown.any():
            # A few may come twice: looking for that takes longer than learning them twice.
            missing = numbers[unknown]
            self._learn(np.unique(missing) if len(missing) > _FEW else missing)
            scores = self._scores[numbers]
        return scores

    def positions(self, number: int) -> tuple[int, ...]:
        """The positions, in a state that it fits, of the GPUs that it is best given."""
        if not self._shape.gpus:
            return ()
        first = int(self._positions[number])
        if self._shape.share:
            return (first,)
        states = self._table.states(np.array([number]))
        usable = self._usable(states)[0] & (self._groups[int(states.kinds[0])] == first)
        return tuple(int(position) for position in np.flatnonzero(usable)[: self._shape.gpus])

    def _learn(self, numbers: Ints) -> None:
        states = self._table.states(numbers)
        self._scores[numbers] = NO_FIT
        origins, rests, positions = self._alternatives(states)
        if not len(origins):
            return
        kinds = states.kinds[origins]
        after = States(kinds, states.cpu_milli[origins] - self._cpu[kinds], rests)
        waste = self._waste.of(states.joined(after))
        scores = score(waste[origins] - waste[len(states) :])
        # The first alternative of equals stays: write in descending order of preference, the best last.
        order = np.argsort(scores[::-1], kind="stable")
        order = len(scores) - 1 - order
        chosen = numbers[origins[order]]
        self._scores[chosen] = scores[order]
        self._positions[chosen] = positions[order]

    def _alternatives(self, states: States) -> tuple[Ints, Ints, Ints]:
        """Each way to give the GPUs: the row it is of, the rests after it, and the position or group."""
        shape = self._shape
        enough_cpu = states.cpu_milli >= self._cpu[states.kinds]
        rests = np.abs(states.rests)
        if not shape.gpus:
            origins = np.flatnonzero(enough_cpu)
            return origins, rests[origins], np.zeros(len(origins), np.int64)
        usable = self._usable(states) & enough_cpu[:, None]
        if shape.share:
            # Within a model rests are sorted: of equal ones the first stands for all.
            same = states.rests[:, 1:] == states.rests[:, :-1]
            usable[:, 1:] &= ~(same & usable[:, :-1])
            origins, positions = np.nonzero(usable)
            after = rests[origins]
            after[np.arange(len(origins)), positions] -= shape.gpu_milli
            return origins, after, positions
        groups = self._groups[states.kinds]
        most = int(groups.max())
        if most == 0:
            return self._whole(rests, usable, 0)
        found = [self._whole(rests, usable & (groups == group), group) for group in range(most + 1)]
        origins, after, which = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return origins, after, which

    def _whole(self, rests: Ints, usable: Bools, group: int) -> tuple[Ints, Ints, Ints]:
        """The first whole GPUs of a model, of which all are alike."""
        given = usable & (usable.cumsum(axis=1) <= self._shape.gpus)
        origins = np.flatnonzero(given.sum(axis=1) == self._shape.gpus)
        return origins, np.where(given[origins], 0, rests[origins]), np.full(len(origins), group)

    def _usable(self, states: States) -> Bools:
        """GPUs that are open, of a model that will do, and have enough left."""
        least = self._shape.gpu_milli if self._shape.share else WHOLE_MILLI
        usable: Bools = (states.rests >= least) & self._allowed[states.kinds]
        return usable


def score(less_waste: Ints) -> Ints:
    """What is saved in whole steps, from 0 up: moves that differ in less are equal."""
    return np.clip(_MIDDLE + (less_waste + _STEP // 2) // _STEP, 0, 2 * _MIDDLE)
