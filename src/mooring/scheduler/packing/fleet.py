"""Where a request would go best, asked thousands of times a second.

Scores are kept for every shape asked lately. What changes on a node is noted, and a shape looks at the
nodes that changed since it was asked last, no others. Nodes in one state have one score.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mooring.scheduler.packing.moves import Moves, Waste
from mooring.scheduler.packing.node_table import RANK_BITS, NodeTable
from mooring.scheduler.packing.potential import Potential
from mooring.scheduler.packing.shapes import FleetNode, Move, NodeClass, Shape
from mooring.scheduler.packing.states import Bools, Ints

Among = Bools | Ints | Sequence[int] | None
Blocked = Mapping[int, Collection[int]]

# The scores of a shape take 80 kB for 10,000 nodes.
MAX_SHAPES = 512
MAX_STATES = 300_000
_NONE = -1


class Fleet:
    """All nodes, known by their index, which stays the same as long as the node is in the fleet.

    Of moves that are equally good, that to the node with the smallest GPUs comes first, then that to the node
    that comes last in the order of `tie_of` its id.
    """

    def __init__(self, nodes: Iterable[FleetNode] = (), potential: Potential | None = None) -> None:
        self._stock = NodeTable()
        self._waste = Waste(potential or Potential(), self._stock.table)
        self._asked: OrderedDict[Shape, _Asked] = OrderedDict()
        self._moves: OrderedDict[Shape, Moves] = OrderedDict()  # of all that differ in memory and owner only
        self._views: OrderedDict[str, _Seen] = OrderedDict()
        self.refresh(nodes)

    # ---- the nodes

    def __len__(self) -> int:
        """The length of a mask: the nodes that are there and those that were removed."""
        return len(self._stock)

    def index(self, node_id: str) -> int:
        """KeyError if it is not in the fleet."""
        return self._stock.indexes[node_id]

    def node(self, index: int) -> FleetNode:
        return self._stock.node(index)

    def refresh(self, nodes: Iterable[FleetNode]) -> None:
        """These nodes are now so: known ones are replaced, new ones are added."""
        for node in nodes:
            self._stock.put(node)

    def remove(self, node_ids: Iterable[str]) -> None:
        """Nothing goes there any more. KeyError if one is not in the fleet."""
        for node_id in node_ids:
            self._stock.remove(node_id)

    def take(self, move: Move, shape: Shape) -> None:
        """The request is there now, on the move's GPUs, which may be others than `best` named.

        Raises:
            ValueError: it does not fit there; nothing has changed then.
        """
        self._stock.change(move.node, move.gpus, shape, -1)

    def give_back(self, move: Move, shape: Shape) -> None:
        """The request has gone from there; the reverse of `take`."""
        self._stock.change(move.node, move.gpus, shape, +1)

    def reprice(self, potential: Potential) -> None:
        """Judge by another potential from now on."""
        self._waste = Waste(potential, self._stock.table)
        self._asked.clear()
        self._moves.clear()

    def rank(self, index: int) -> int:
        """Of two nodes for which a request is equally good, the one with the higher rank is preferred."""
        return int(self._stock.ranks[index])

    # ---- the questions

    def best(self, shape: Shape, among: Among = None, blocked: Blocked | None = None) -> Move | None:
        """The best move for a request, or None where it fits nowhere.

        `among`: the nodes that may be chosen, as a mask or as indexes. `blocked`: GPUs, by their places, that
        this request may not be given, by the node's index.
        """
        return next(iter(self.ranked(shape, 1, among, blocked)), None)

    def ranked(
        self, shape: Shape, count: int, among: Among = None, blocked: Blocked | None = None
    ) -> list[Move]:
        """The best move on each of the best `count` nodes, best first."""
        scores = self._current(shape)
        if blocked:
            scores = self._around(shape, scores, blocked)
        if among is not None:
            allowed = np.full(len(scores), _NONE)
            allowed[among] = scores[among]
            scores = allowed
        return [
            self._move(node, shape, int(scores[node]), (blocked or {}).get(node, ()))
            for node in _highest(scores, count)
        ]

    # ---- within

    def _current(self, shape: Shape) -> Ints:
        """The scores of all nodes, with the nodes' ranks below them; -1 where it does not fit."""
        stock = self._stock
        if len(stock.table) > MAX_STATES:
            self._forget()
        asked = self._of(shape)
        changed = asked.missed(stock)
        if len(changed):
            quality = asked.moves.scores(self._seen_by(shape)[changed])
            fits = (quality >= 0) & (stock.memory[changed] >= asked.memory[stock.kinds[changed]])
            fits &= stock.here[changed]
            asked.values[changed] = np.where(fits, (quality << RANK_BITS) + stock.ranks[changed], _NONE)
        return asked.values[: len(stock)]

    def _of(self, shape: Shape) -> "_Asked":
        asked = self._asked.get(shape)
        if asked is None:
            asked = self._asked[shape] = _Asked(shape, self._moves_of(shape))
            if len(self._asked) > MAX_SHAPES:
                self._asked.popitem(last=False)
        else:
            self._asked.move_to_end(shape)
        asked.meet_kinds(self._stock.table.classes)
        return asked

    def _moves_of(self, shape: Shape) -> Moves:
        alike = replace(shape, memory_mib=0, owner="")
        moves = self._moves.get(alike)
        if moves is None:
            moves = self._moves[alike] = Moves(alike, self._stock.table, self._waste)
            if len(self._moves) > MAX_SHAPES:
                self._moves.popitem(last=False)
        self._moves.move_to_end(alike)
        return moves

    def _seen_by(self, shape: Shape) -> Ints:
        """The states as the shape sees them: to shares, GPUs that are somebody else's in part are closed."""
        stock = self._stock
        if not shape.share or not stock.shared:
            return stock.states
        view = self._views.setdefault(shape.owner, _Seen())
        self._views.move_to_end(shape.owner)
        if len(self._views) > MAX_SHAPES:
            self._views.popitem(last=False)
        changed = view.missed(stock)
        view.values[changed] = stock.states[changed]
        for node in stock.shared.intersection(changed.tolist()):
            view.values[node] = stock.state_for(node, stock.rests_for(node, shape))
        return view.values

    def _around(self, shape: Shape, scores: Ints, blocked: Blocked) -> Ints:
        """The scores without what is blocked."""
        scores = scores.copy()
        moves = self._of(shape).moves
        nodes = [node for node, places in blocked.items() if places and scores[node] != _NONE]
        for node in nodes:
            state = self._stock.state_for(node, self._stock.rests_for(node, shape, blocked[node]))
            quality = int(moves.scores(np.array([state]))[0])
            scores[node] = _NONE if quality < 0 else (quality << RANK_BITS) + int(self._stock.ranks[node])
        return scores

    def _move(self, node: int, shape: Shape, score: int, blocked: Collection[int]) -> Move:
        rests = self._stock.rests_for(node, shape, blocked)
        positions = self._of(shape).moves.positions(self._stock.state_for(node, rests))
        return Move(node, self._stock.places(node, rests, positions), score >> RANK_BITS)

    def _forget(self) -> None:
        self._stock.renumber()
        self._asked.clear()
        self._moves.clear()
        self._views.clear()


class _Seen:
    """Something known of every node, and up to which change it is true."""

    def __init__(self) -> None:
        self.values = np.zeros(0, np.int64)
        self._seen = -1  # nothing

    def missed(self, stock: NodeTable) -> Ints:
        """The nodes to look at again; those that are new have room in `values`."""
        if len(self.values) < len(stock):
            self.values = np.concatenate(
                [self.values, np.zeros(len(stock.states) - len(self.values), np.int64)]
            )
        changed = stock.since(self._seen)
        self._seen = stock.noted
        return changed


class _Asked(_Seen):
    """The scores of one shape."""

    def __init__(self, shape: Shape, moves: Moves) -> None:
        super().__init__()
        self.moves = moves
        self.memory = np.zeros(0, np.int64)  # MiB that it takes on a node of each class
        self._shape = shape

    def meet_kinds(self, classes: Sequence[NodeClass]) -> None:
        """There may be further classes."""
        if len(self.memory) < len(classes):
            self.memory = np.array([self._shape.takes(each)[1] for each in classes], np.int64)
            self.moves.meet_kinds()


def _highest(scores: Ints, count: int) -> list[int]:
    """The indexes of the highest scores that are one, highest first."""
    if not len(scores):
        return []
    if count == 1:
        best = int(scores.argmax())
        return [best] if scores[best] >= 0 else []
    there = np.flatnonzero(scores >= 0)
    if len(there) > count:
        there = there[np.argpartition(scores[there], -count)[-count:]]
    return [int(node) for node in there[np.argsort(-scores[there], kind="stable")]]
