"""The nodes of a scheduling cycle, with what the cycle has placed so far. Cached between cycles.

A node that did not change is the same object in the next snapshot, so only other nodes are read again.
Earlier cycles affect the speed of this one, never its result.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mooring.core.bounded_dict import BoundedDict
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState
from mooring.scheduler.feasibility.gpu_rules import Ask, ask_of
from mooring.scheduler.model import NodeView, Request, Running
from mooring.scheduler.packing import links
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.fleet import Fleet
from mooring.scheduler.packing.node_classes import (
    NodeKind,
    Suitable,
    fleet_node,
    kind_of,
    places_of,
    suitable,
)
from mooring.scheduler.packing.potential import Potential
from mooring.scheduler.packing.shapes import NodeClass

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
_INITIAL = Demand().potential
Numbers = TypeVar("Numbers", Ints, Mask)


@dataclass(slots=True)
class Held:
    """What the instances of one project have, in the units of its nodes."""

    gpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0

    def add(self, running: Running, sign: int) -> None:
        self.gpu_milli += sign * running.gpu_milli
        self.cpu_milli += sign * running.cpu_milli
        self.memory_mib += sign * running.memory_mib


class ClusterState:
    """All nodes by their index in the fleet. The index of a removed node is not reused."""

    def __init__(self) -> None:
        self._potential = _INITIAL
        self.fleet = Fleet((), self._potential)
        self.nodes: list[NodeView | None] = []  # null: removed
        self.kinds: list[NodeKind] = []
        self._kind_of: Ints = np.zeros(0, np.int64)  # by node, with spare capacity
        self.changes: list[int] = []  # node indices in the order of their changes, with repeats
        self.held: dict[str, Held] = {}  # by project
        self.groups: dict[str, Counter[int]] = {}  # placed members of each gang, by node
        self.with_holds: set[int] = set()
        self.reserved: set[int] = set()  # nodes that are reserved for some projects
        self.with_pressure: set[int] = set()  # nodes with a nearly full disk
        self.with_last: set[int] = set()  # nodes with GPUs that are allocated last
        self.with_stopping: set[int] = set()
        self.stopping: Counter[str] = Counter()  # GPUs (milli) of stopping instances, by project
        self.preemptible: Counter[int] = Counter()  # preemptible instances, by priority
        self.total = Held()  # of all nodes in any state
        self._index: dict[str, int] = {}
        self._kind_numbers: dict[NodeKind, int] = {}
        self._classes: list[NodeClass] = []
        self._as_given: list[NodeView | None] = []  # as in the snapshot; null: changed since
        self._last_given: Sequence[NodeView] | None = None  # null: nodes changed since the last snapshot
        self._numbers: BoundedDict[object, _Numbers] = BoundedDict(256)
        self._before: dict[int, NodeView] | None = None  # nodes before the current what-if
        self._suitable: BoundedDict[tuple[int, Ask], Suitable] = BoundedDict(100_000)
        self._codes: dict[Hashable, int] = {None: 0}  # of the values that group nodes

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def kind_of(self) -> Ints:
        """The number of each node's kind."""
        return self._kind_of[: len(self.nodes)]

    def should_rebuild(self, nodes: int) -> bool:
        """Whether removed nodes take so much memory that a new state would be smaller."""
        return len(self.nodes) > 2 * nodes + 64 or len(self.changes) > 100_000 + 10 * nodes

    # ---- between cycles

    def set_potential(self, potential: Potential | None) -> None:
        """Set the potential, which measures wasted GPUs; None: no demand was learnt yet."""
        potential = potential or _INITIAL
        if potential is not self._potential:
            self._potential = potential
            self.fleet.reprice(potential)

    def update(self, nodes: Sequence[NodeView]) -> None:
        """Replace the nodes by those of the current snapshot."""
        if nodes is self._last_given:
            return
        for node in nodes:
            index = self._index.get(node.id)
            if index is None or self._as_given[index] is not node:
                self._as_given[self.put(_in_order(node))] = node
        if len(self._index) > len(nodes):
            self._remove(self._index.keys() - {node.id for node in nodes})
        self._last_given = nodes

    # ---- the nodes

    def index(self, node_id: str) -> int:
        return self._index[node_id]

    def node(self, index: int) -> NodeView:
        """Raises: KeyError: the node was removed."""
        if (node := self.nodes[index]) is None:
            raise KeyError(index)
        return node

    def present(self) -> Iterable[tuple[int, NodeView]]:
        return ((index, node) for index, node in enumerate(self.nodes) if node is not None)

    def put(self, node: NodeView) -> int:
        """Add or replace a node, and return its index."""
        index = self._index.get(node.id)
        if index is None:
            index = self._add(node)
        before = self.nodes[index]
        if self._before is not None and before is not None:
            self._before.setdefault(index, before)
        there = list(places_of(node))
        number = self._kind_of[index] = self._number(kind_of(node, there))
        as_class = self._classes[number]
        self.fleet.refresh([fleet_node(node, as_class, there, open_=node.state is NodeState.READY)])
        self._count(index, before, node)
        self.nodes[index] = node
        self._as_given[index] = None
        self._last_given = None
        self.changes.append(index)
        return index

    def _add(self, node: NodeView) -> int:
        self.nodes.append(None)
        if len(self._kind_of) < len(self.nodes):
            self._kind_of = grown(self._kind_of, 2 * len(self.nodes))
        self._as_given.append(None)
        self._index[node.id] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def _remove(self, gone: Iterable[str]) -> None:
        for node_id in gone:
            index = self._index.pop(node_id)
            self._count(index, self.nodes[index], None)
            self.nodes[index] = None
            self._as_given[index] = None
            self.fleet.remove([node_id])
            self.changes.append(index)

    def _number(self, kind: NodeKind) -> int:
        number = self._kind_numbers.get(kind)
        if number is None:
            number = self._kind_numbers[kind] = len(self.kinds)
            self.kinds.append(kind)
            self._classes.append(kind.as_class)
        return number

    def suitable(self, request: Request) -> list[Suitable]:
        """By the number of each node kind: which parts of it suit the request."""
        ask = ask_of(request)
        return [
            self._suitable.get((number, ask)) or self._suit(number, ask, request)
            for number in range(len(self.kinds))
        ]

    def _suit(self, number: int, ask: Ask, request: Request) -> Suitable:
        found = self._suitable[number, ask] = suitable(self.kinds[number], request)
        return found

    @contextmanager
    def what_if(self) -> Iterator["WhatIf"]:
        """Undo all changes to nodes at the end of the block, unless they are applied."""
        outer = self._before
        before: dict[int, NodeView] = {}
        self._before = before
        what_if = WhatIf()
        try:
            yield what_if
        finally:
            # For the enclosing what-if, only changes that are applied count as changes.
            self._before = None
            for index, node in before.items():
                if not what_if.applied:
                    self.put(node)
                elif outer is not None:
                    outer.setdefault(index, node)
            self._before = outer

    # ---- counters

    def _count(self, index: int, before: NodeView | None, after: NodeView | None) -> None:
        for node, sign in ((before, -1), (after, +1)):
            if node is not None:
                self.total.gpu_milli += sign * WHOLE_MILLI * len(node.gpus)
                self.total.cpu_milli += sign * node.cpu_milli
                self.total.memory_mib += sign * node.memory_mib
        old = before.running if before else ()
        new = after.running if after else ()
        if old is not new:
            self._count_running(index, old, new)
        gpus = after.gpus if after else ()
        _mark(self.with_holds, index, there=any(gpu.reserved for gpu in gpus))
        _mark(self.with_last, index, there=any(gpu.last for gpu in gpus))
        _mark(self.reserved, index, there=after is not None and after.reserved_for is not None)
        _mark(self.with_pressure, index, there=after is not None and after.disk_pressure)

    def reserved_for(self, project_id: str) -> frozenset[int]:
        """The reserved nodes that the project may use. Projects with equal sets get equal answers."""
        return frozenset(
            index for index in self.reserved if project_id in (self.node(index).reserved_for or ())
        )

    def _count_running(self, index: int, old: tuple[Running, ...], new: tuple[Running, ...]) -> None:
        same = 0
        for a, b in zip(old, new, strict=False):
            if a is not b:
                break
            same += 1
        for running, sign in [(each, -1) for each in old[same:]] + [(each, +1) for each in new[same:]]:
            self.held.setdefault(running.project_id, Held()).add(running, sign)
            if running.stopping:
                _add(self.stopping, running.project_id, sign * running.gpu_milli)
            elif running.preemptible:
                _add(self.preemptible, running.priority, sign)
            if running.group_id is not None:
                members = self.groups.setdefault(running.group_id, Counter())
                _add(members, index, sign)
                if not members:
                    del self.groups[running.group_id]
        _mark(self.with_stopping, index, there=any(running.stopping for running in new))

    # ---- masks

    def mask(self, key: object, belongs: Callable[[NodeView], bool]) -> Mask:
        """The nodes for which the predicate is true. It runs only for nodes that changed.

        Args:
            key: identifies `belongs`; equal keys must mean equal predicates.
        """
        return cast(Mask, self.numbers(key, belongs) != 0)

    def numbers(self, key: object, number: Callable[[NodeView], int]) -> Ints:
        """As `mask`, with a number for each node; 0 for removed nodes."""
        if key not in self._numbers:
            self._numbers[key] = _Numbers()
        return self._numbers[key].current(self, number)

    def groups_by(self, value: Callable[[NodeView], Hashable]) -> tuple[Ints, Sequence[Hashable]]:
        """A number for each node's value, and the values by their numbers; 0 stands for None.

        Args:
            value: must be the same function object in each call, because it is part of the cache key.
        """

        def code(node: NodeView) -> int:
            return self._codes.setdefault(value(node), len(self._codes))

        return self.numbers(("groups", value), code), list(self._codes)


def _mark(nodes: set[int], index: int, *, there: bool) -> None:
    if there:
        nodes.add(index)
    else:
        nodes.discard(index)


def _add(counter: Counter[Any], key: object, amount: int) -> None:
    """Add to a counter, and delete the key at zero, so that counters with equal amounts are equal."""
    counter[key] += amount
    if not counter[key]:
        del counter[key]


@dataclass(slots=True)
class WhatIf:
    """Decides whether the changes of a what-if block stay."""

    applied: bool = False

    def apply(self) -> None:
        self.applied = True


@dataclass(slots=True)
class _Numbers:
    values: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    seen: int = 0

    def current(self, cluster: ClusterState, number: Callable[[NodeView], int]) -> Ints:
        self.values = grown(self.values, len(cluster))
        for index in set(cluster.changes[self.seen :]):
            node = cluster.nodes[index]
            self.values[index] = 0 if node is None else number(node)
        self.seen = len(cluster.changes)
        return self.values


def grown(array: Numbers, length: int) -> Numbers:
    """The array with zeros appended."""
    more = length - len(array)
    return np.concatenate([array, np.zeros(more, array.dtype)]) if more > 0 else array


def _in_order(node: NodeView) -> NodeView:
    """Sort the GPUs and instances, so that a plan does not depend on the order of the input."""
    gpus = tuple(links.in_order(node.gpus))
    running = tuple(sorted(node.running, key=attrgetter("instance_id")))
    same = gpus == node.gpus and running == node.running
    return node if same else replace(node, gpus=gpus, running=running)
