"""The nodes as arrays: where a request would go best, asked thousands of times a second.

Scores are kept for every shape asked lately. What changes on a node is noted, and a shape looks at the
nodes that changed since it was asked last, no others. Two nodes in one state have one score.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mooring.scheduler.moves import Moves
from mooring.scheduler.potential import Potential
from mooring.scheduler.shapes import WHOLE, FleetNode, Move, Shape, tie_of
from mooring.scheduler.states import Bools, Ints, StateTable

Among = Bools | Sequence[int] | None
Blocked = Mapping[int, Collection[int]]

# Scores of a shape for 10,000 nodes take 80 kB.
MAX_SHAPES = 512
# Notes of changes that are kept: a shape not asked for that long looks at every node again.
MAX_NOTES = 100_000
MAX_STATES = 300_000
_TIE_BITS = 48
_NONE = -1


class Fleet:
    """All nodes, known by their index, which stays the same as long as the node is in the fleet.

    Equal moves go to the node that comes first in the order of `tie_of` its id.
    """

    def __init__(self, nodes: Iterable[FleetNode] = (), potential: Potential | None = None) -> None:
        self._table = StateTable()
        self._potential = potential or Potential()
        self._ids: list[str] = []
        self._index: dict[str, int] = {}
        self._kinds: list[int] = []
        self._cpu: list[int] = []
        self._rests: list[list[int]] = []
        self._owners: list[list[str]] = []
        self._memory = np.zeros(0, np.int64)
        self._state = np.zeros(0, np.int64)
        self._ties = np.zeros(0, np.int64)
        self._gone: set[int] = set()
        self._notes: list[int] = []
        self._noted = 0  # notes ever made; the first kept is number `_noted - len(_notes)`
        self._asked: OrderedDict[Shape, _Scores] = OrderedDict()
        self._views: OrderedDict[str, _View] = OrderedDict()
        self._moves: dict[Shape, Moves] = {}
        self.refresh(nodes)

    # ---- the nodes

    def __len__(self) -> int:
        """The indexes in use and those of nodes that were removed: the length of a mask."""
        return len(self._ids)

    def index(self, node_id: str) -> int:
        """KeyError if it is not in the fleet."""
        return self._index[node_id]

    def node(self, index: int) -> FleetNode:
        return FleetNode(
            self._ids[index],
            self._table.kinds[self._kinds[index]].value,
            self._cpu[index],
            int(self._memory[index]),
            tuple(self._rests[index]),
            tuple(self._owners[index]),
        )

    def refresh(self, nodes: Iterable[FleetNode]) -> None:
        """These nodes are now so: known ones are replaced, new ones are added."""
        for node in nodes:
            if node.id not in self._index:
                self._add(node.id)
            self._set(self._index[node.id], node)

    def remove(self, node_ids: Iterable[str]) -> None:
        """Nothing goes to these any more; their indexes are not used again."""
        for node_id in node_ids:
            index = self._index.pop(node_id)
            self._gone.add(index)
            self._note(index)

    def take(self, move: Move, shape: Shape) -> None:
        """The request is there now. ValueError if that does not fit: nothing has changed then."""
        self._change(move.node, move.gpus, shape, -1)

    def give_back(self, move: Move, shape: Shape) -> None:
        """The request has gone from there; the reverse of `take`."""
        self._change(move.node, move.gpus, shape, +1)

    # ---- the questions

    def best(self, shape: Shape, among: Among = None, blocked: Blocked | None = None) -> Move | None:
        """The best move for a request, or None where it fits nowhere.

        `among`: the nodes that may be chosen, a mask or indexes. `blocked`: GPUs, by their places, that this
        request may not be given, by the node's index.
        """
        scores = self._within(self._scores(shape), among)
        if blocked:
            return self._best_around(shape, scores, blocked)
        node = int(scores.argmax()) if len(scores) else _NONE
        if node == _NONE or scores[node] < 0:
            return None
        return self._move(node, shape, int(scores[node]))

    def ranked(
        self, shape: Shape, count: int, among: Among = None, blocked: Blocked | None = None
    ) -> list[Move]:
        """The best move on each of the best `count` nodes, best first."""
        scores = self._within(self._scores(shape), among).copy()
        moves: list[Move] = []
        while len(moves) < count and (move := self._best_of(shape, scores, blocked)):
            moves.append(move)
            scores[move.node] = _NONE
        return moves

    def fitting(self, shape: Shape) -> Bools:
        """The nodes that it fits, as a mask."""
        return cast(Bools, self._scores(shape) >= 0)

    def reprice(self, potential: Potential) -> None:
        """Judge by another potential from now on."""
        self._potential = potential
        self._moves.clear()
        self._asked.clear()

    # ---- within

    def _best_of(self, shape: Shape, scores: Ints, blocked: Blocked | None) -> Move | None:
        if blocked:
            return self._best_around(shape, scores, blocked)
        node = int(scores.argmax()) if len(scores) else _NONE
        return None if node == _NONE or scores[node] < 0 else self._move(node, shape, int(scores[node]))

    def _best_around(self, shape: Shape, scores: Ints, blocked: Blocked) -> Move | None:
        scores = scores.copy()
        around = {node: places for node, places in blocked.items() if scores[node] >= 0 and places}
        states = {node: self._state_without(node, shape.owner, places) for node, places in around.items()}
        for node, state in states.items():
            scores[node] = self._combined(node, self._moves_of(shape).score(state))
        node = int(scores.argmax()) if len(scores) else _NONE
        if node == _NONE or scores[node] < 0:
            return None
        return self._move(node, shape, int(scores[node]), around.get(node, ()))

    def _scores(self, shape: Shape) -> Ints:
        scores = self._asked.get(shape)
        if len(self._table) > MAX_STATES:
            self._forget()
            scores = None
        if scores is None:
            scores = self._asked[shape] = _Scores(len(self))
            if len(self._asked) > MAX_SHAPES:
                old, _ = self._asked.popitem(last=False)
                self._moves.pop(old, None)
        else:
            self._asked.move_to_end(shape)
        changed = self._since(scores.seen)
        if len(changed):
            scores.grow(len(self))
            self._score(shape, scores.values, changed)
        scores.seen = self._noted
        return scores.values

    def _score(self, shape: Shape, values: Ints, nodes: Ints) -> None:
        moves = self._moves_of(shape)
        scores = moves.scores(self._view(shape)[nodes])
        fits = (scores >= 0) & (self._memory[nodes] >= moves.memory[self._kind_of(nodes)])
        values[nodes] = np.where(fits, (scores << _TIE_BITS) + self._ties[nodes], _NONE)
        if self._gone:
            values[list(self._gone)] = _NONE

    def _kind_of(self, nodes: Ints) -> Ints:
        return self._node_kinds[nodes]

    def _moves_of(self, shape: Shape) -> Moves:
        moves = self._moves.get(shape)
        if moves is None:
            moves = self._moves[shape] = Moves(shape, self._table, self._potential)
        return moves
