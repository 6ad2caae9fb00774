"""Finds the best node for a request, for thousands of requests a second.

Scores are cached per shape and node. A query scores only the nodes that changed since the last query for its
shape. Nodes in the same state share one score.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from cachetools import LRUCache

from mooring.scheduler.packing.moves import Moves, Waste
from mooring.scheduler.packing.node_table import RANK_BITS, NodeTable
from mooring.scheduler.packing.potential import Potential
from mooring.scheduler.packing.shapes import FleetNode, Move, NodeClass, Shape
from mooring.scheduler.packing.states import Bools, Ints

Among = Bools | Ints | Sequence[int] | None
Blocked = Mapping[int, Collection[int]]

# The scores of one shape for 10,000 nodes take 80 kB.
MAX_SHAPES = 512
MAX_STATES = 300_000
_NONE = -1


class Fleet:
    """All nodes. A node keeps its index for as long as it is in the fleet.

    Of equally good moves, the node with the smallest GPUs comes first, then the highest `tie_of`.
    """

    def __init__(self, nodes: Iterable[FleetNode] = (), potential: Potential | None = None) -> None:
        self._nodes = NodeTable()
        self._waste = Waste(potential or Potential(), self._nodes.table)
        self._scores: LRUCache[Shape, _ShapeScores] = LRUCache(MAX_SHAPES)
        self._moves: LRUCache[Shape, Moves] = LRUCache(MAX_SHAPES)  # by shape without memory and owner
        self._views: LRUCache[str, _NodeValues] = LRUCache(MAX_SHAPES)  # states by owner, see `_states_for`
        self.refresh(nodes)

    def __len__(self) -> int:
        """The length of a mask: present and removed nodes."""
        return len(self._nodes)

    def index(self, node_id: str) -> int:
        """Raises KeyError if it is not in the fleet."""
        return self._nodes.indexes[node_id]

    def node(self, index: int) -> FleetNode:
        return self._nodes.node(index)

    def refresh(self, nodes: Iterable[FleetNode]) -> None:
        """Replace known nodes and add new ones."""
        for node in nodes:
            self._nodes.put(node)

    def remove(self, node_ids: Iterable[str]) -> None:
        """Raises KeyError if a node is not in the fleet."""
        for node_id in node_ids:
            self._nodes.remove(node_id)

    def take(self, move: Move, shape: Shape) -> None:
        """Allocate what the request needs, on the move's GPUs (not necessarily those that `best` returned).

        Raises:
            ValueError: it does not fit; nothing has changed.
        """
        self._nodes.change(move.node, move.gpus, shape, -1)

    def give_back(self, move: Move, shape: Shape) -> None:
        """Release what `take` allocated."""
        self._nodes.change(move.node, move.gpus, shape, +1)

    def reprice(self, potential: Potential) -> None:
        """Use another potential from now on."""
        self._waste = Waste(potential, self._nodes.table)
        self._scores.clear()
        self._moves.clear()

    def rank(self, index: int) -> int:
        """Of two nodes with equal scores, the one with the higher rank is preferred."""
        return int(self._nodes.ranks[index])

    def best(self, shape: Shape, among: Among = None, blocked: Blocked | None = None) -> Move | None:
        """The best move for a request; None if it fits nowhere.

        Args:
            among: the candidate nodes, as a mask or as indexes.
            blocked: places of GPUs that this request may not use, by node index.
        """
        return next(iter(self.ranked(shape, 1, among, blocked)), None)

    def ranked(
        self, shape: Shape, count: int, among: Among = None, blocked: Blocked | None = None
    ) -> list[Move]:
        """The best move on each of the `count` best nodes, best first."""
        scores = self._current_scores(shape)
        if blocked:
            scores = self._without_blocked(shape, scores, blocked)
        if among is not None:
            allowed = np.full(len(scores), _NONE)
            allowed[among] = scores[among]
            scores = allowed
        return [
            self._move(node, shape, int(scores[node]), (blocked or {}).get(node, ()))
            for node in _highest(scores, count)
        ]

    def _current_scores(self, shape: Shape) -> Ints:
        """The score of each node in the high bits, its rank in the low ones; -1 if the shape does not fit."""
        nodes = self._nodes
        if len(nodes.table) > MAX_STATES:
            self._clear_caches()
        cached = self._scores_of(shape)
        changed = cached.next_changes(nodes)
        if len(changed):
            quality = cached.moves.scores(self._states_for(shape)[changed])
            fits = (quality >= 0) & (nodes.memory[changed] >= cached.memory[nodes.classes[changed]])
            fits &= nodes.present[changed]
            cached.values[changed] = np.where(fits, (quality << RANK_BITS) + nodes.ranks[changed], _NONE)
        return cached.values[: len(nodes)]

    def _scores_of(self, shape: Shape) -> "_ShapeScores":
        cached = self._scores.get(shape)
        if cached is None:
            cached = self._scores[shape] = _ShapeScores(shape, self._moves_of(shape))
        cached.add_classes(self._nodes.table.classes)
        return cached

    def _moves_of(self, shape: Shape) -> Moves:
        without_memory = replace(shape, memory_mib=0, owner="")
        moves = self._moves.get(without_memory)
        if moves is None:
            moves = self._moves[without_memory] = Moves(without_memory, self._nodes.table, self._waste)
        return moves

    def _states_for(self, shape: Shape) -> Ints:
        """The states as the shape sees them: a share cannot use GPUs that other owners share."""
        nodes = self._nodes
        if not shape.share or not nodes.shared:
            return nodes.states
        view = self._views.setdefault(shape.owner, _NodeValues())
        changed = view.next_changes(nodes)
        view.values[changed] = nodes.states[changed]
        for node in nodes.shared.intersection(changed.tolist()):
            view.values[node] = nodes.state_for(node, nodes.gpu_free_for(node, shape))
        return view.values

    def _without_blocked(self, shape: Shape, scores: Ints, blocked: Blocked) -> Ints:
        """The scores without the blocked GPUs."""
        scores = scores.copy()
        moves = self._scores_of(shape).moves
        nodes = [node for node, places in blocked.items() if places and scores[node] != _NONE]
        for node in nodes:
            state = self._nodes.state_for(node, self._nodes.gpu_free_for(node, shape, blocked[node]))
            quality = int(moves.scores(np.array([state]))[0])
            scores[node] = _NONE if quality < 0 else (quality << RANK_BITS) + int(self._nodes.ranks[node])
        return scores

    def _move(self, node: int, shape: Shape, score: int, blocked: Collection[int]) -> Move:
        gpu_free = self._nodes.gpu_free_for(node, shape, blocked)
        positions = self._scores_of(shape).moves.positions(self._nodes.state_for(node, gpu_free))
        return Move(node, self._nodes.places(node, gpu_free, positions), score >> RANK_BITS)

    def _clear_caches(self) -> None:
        self._nodes.renumber()
        self._scores.clear()
        self._moves.clear()
        self._views.clear()


class _NodeValues:
    """A cached value per node, and the number of the last change that it includes."""

    def __init__(self) -> None:
        self.values = np.zeros(0, np.int64)
        self._seen = -1  # no change is included

    def next_changes(self, nodes: NodeTable) -> Ints:
        """The nodes whose value is out of date; makes room for new nodes in `values`."""
        if len(self.values) < len(nodes):
            more = np.zeros(len(nodes.states) - len(self.values), np.int64)
            self.values = np.concatenate([self.values, more])
        changed = nodes.changed_since(self._seen)
        self._seen = nodes.change_count
        return changed


class _ShapeScores(_NodeValues):
    """The scores of one shape."""

    def __init__(self, shape: Shape, moves: Moves) -> None:
        super().__init__()
        self.moves = moves
        self.memory = np.zeros(0, np.int64)  # MiB needed, by class
        self._shape = shape

    def add_classes(self, classes: Sequence[NodeClass]) -> None:
        if len(self.memory) < len(classes):
            self.memory = np.array([self._shape.takes(each)[1] for each in classes], np.int64)
            self.moves.add_classes()


def _highest(scores: Ints, count: int) -> list[int]:
    """The indexes of the highest scores that are not -1, highest first."""
    if not len(scores):
        return []
    if count == 1:
        best = int(scores.argmax())
        return [best] if scores[best] >= 0 else []
    fitting = np.flatnonzero(scores >= 0)
    if len(fitting) > count:
        fitting = fitting[np.argpartition(scores[fitting], -count)[-count:]]
    return [int(node) for node in fitting[np.argsort(-scores[fitting], kind="stable")]]
