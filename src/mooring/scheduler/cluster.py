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
from mooring.scheduler.feasibility.gpu_rules import GpuKey, gpu_key
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
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
_INITIAL_POTENTIAL = Demand().potential
Array = TypeVar("Array", Ints, Mask)


@dataclass(slots=True)
class Resources:
    """Amounts of GPUs, CPUs and memory."""

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
        self._potential = _INITIAL_POTENTIAL
        self.fleet = Fleet((), self._potential)
        self.nodes: list[NodeView | None] = []  # null: removed
        self.kinds: list[NodeKind] = []
        self._kind_of: Ints = np.zeros(0, np.int64)  # by node, with spare capacity
        self.changes: list[int] = []  # node indices in the order of their changes, with repeats
        self.held: dict[str, Resources] = {}  # by the instances of each project
        self.groups: dict[str, Counter[int]] = {}  # placed members of each gang, by node
        self.with_reserved_gpus: set[int] = set()
        self.reserved: set[int] = set()  # nodes that only some projects may use
        self.with_pressure: set[int] = set()  # nodes with a nearly full disk
        self.with_last: set[int] = set()  # nodes with GPUs that are allocated last
        self.with_stopping: set[int] = set()
        self.stopping: Counter[str] = Counter()  # GPUs (milli) of stopping instances, by project
        self.preemptible: Counter[int] = Counter()  # preemptible instances, by priority
        self.total = Resources()  # of all nodes in any state
        self._index: dict[str, int] = {}
        self._kind_numbers: dict[NodeKind, int] = {}
        self._classes: list[NodeClass] = []
        self._as_given: list[NodeView | None] = []  # as in the snapshot; null: changed since
        self._last_given: Sequence[NodeView] | None = None  # null: nodes changed since the last snapshot
        self._numbers: BoundedDict[object, _NodeNumbers] = BoundedDict(256)
        self._before: dict[int, NodeView] | None = None  # nodes before the current what-if
        self._suitable: BoundedDict[tuple[int, GpuKey], Suitable] = BoundedDict(100_000)
        self._value_numbers: dict[Hashable, int] = {None: 0}  # for `groups_by`

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def kind_of(self) -> Ints:
        """The number of each node's kind."""
        return self._kind_of[: len(self.nodes)]

    def should_rebuild(self, node_count: int) -> bool:
        """Whether removed nodes, or the list of changes, take much more memory than a new state would."""
        return len(self.nodes) > 2 * node_count + 64 or len(self.changes) > 100_000 + 10 * node_count

    # ---- between cycles

    def set_potential(self, potential: Potential | None) -> None:
        """Set the potential, which measures wasted GPUs; None: no demand was learnt yet."""
        potential = potential or _INITIAL_POTENTIAL
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
        devices = list(places_of(node))
        kind = self._kind_of[index] = self._kind_number(kind_of(node, devices))
        node_class = self._classes[kind]
        self.fleet.refresh([fleet_node(node, node_class, devices, open_=node.state is NodeState.READY)])
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

    def _kind_number(self, kind: NodeKind) -> int:
        number = self._kind_numbers.get(kind)
        if number is None:
            number = self._kind_numbers[kind] = len(self.kinds)
            self.kinds.append(kind)
            self._classes.append(kind.as_class)
        return number

    def suitable(self, request: Request) -> list[Suitable]:
        """For each node kind, in the order of `kinds`: which of its places suit the request."""
        key = gpu_key(request)
        return [
            self._suitable.get((number, key)) or self._find_suitable(number, key, request)
            for number in range(len(self.kinds))
        ]

    def _find_suitable(self, number: int, key: GpuKey, request: Request) -> Suitable:
        found = self._suitable[number, key] = suitable(self.kinds[number], request)
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
        _mark(self.with_reserved_gpus, index, included=any(gpu.reserved for gpu in gpus))
        _mark(self.with_last, index, included=any(gpu.last for gpu in gpus))
        _mark(self.reserved, index, included=after is not None and after.reserved_for is not None)
        _mark(self.with_pressure, index, included=after is not None and after.disk_pressure)

    def reserved_for(self, project_id: str) -> frozenset[int]:
        """The reserved nodes that the project may use; a part of cache keys."""
        return frozenset(
            index for index in self.reserved if project_id in (self.node(index).reserved_for or ())
        )

    def _count_running(self, index: int, old: tuple[Running, ...], new: tuple[Running, ...]) -> None:
        same = 0  # instances at the start of both, which need not be counted again
        for before, after in zip(old, new, strict=False):
            if before is not after:
                break
            same += 1
        for running, sign in [(each, -1) for each in old[same:]] + [(each, +1) for each in new[same:]]:
            self.held.setdefault(running.project_id, Resources()).add(running, sign)
            if running.stopping:
                _add(self.stopping, running.project_id, sign * running.gpu_milli)
            elif running.preemptible:
                _add(self.preemptible, running.priority, sign)
            if running.group_id is not None:
                members = self.groups.setdefault(running.group_id, Counter())
                _add(members, index, sign)
                if not members:
                    del self.groups[running.group_id]
        _mark(self.with_stopping, index, included=any(running.stopping for running in new))

    # ---- masks

    def mask(self, key: object, predicate: Callable[[NodeView], bool]) -> Mask:
        """The nodes for which `predicate` is true. It is called only for nodes that changed.

        Args:
            key: identifies `predicate`; equal keys must mean equal predicates.
        """
        return cast(Mask, self.numbers(key, predicate) != 0)

    def numbers(self, key: object, number: Callable[[NodeView], int]) -> Ints:
        """As `mask`, with a number for each node; 0 for removed nodes."""
        if key not in self._numbers:
            self._numbers[key] = _NodeNumbers()
        return self._numbers[key].current(self, number)

    def groups_by(self, value: Callable[[NodeView], Hashable]) -> tuple[Ints, Sequence[Hashable]]:
        """The number of each node's value, and the values by number; the number of None is 0.

        Args:
            value: must be the same function object in each call, because the object is part of the cache key.
        """

        def number(node: NodeView) -> int:
            return self._value_numbers.setdefault(value(node), len(self._value_numbers))

        return self.numbers(("groups", value), number), list(self._value_numbers)


def _mark(nodes: set[int], index: int, *, included: bool) -> None:
    if included:
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
class _NodeNumbers:
    values: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    seen: int = 0  # changes that `values` includes

    def current(self, cluster: ClusterState, number: Callable[[NodeView], int]) -> Ints:
        self.values = grown(self.values, len(cluster))
        for index in set(cluster.changes[self.seen :]):
            node = cluster.nodes[index]
            self.values[index] = 0 if node is None else number(node)
        self.seen = len(cluster.changes)
        return self.values


def grown(array: Array, length: int) -> Array:
    """The array with zeros appended."""
    more = length - len(array)
    return np.concatenate([array, np.zeros(more, array.dtype)]) if more > 0 else array


def _in_order(node: NodeView) -> NodeView:
    """The node with its GPUs and instances sorted, so that a plan does not depend on their order."""
    gpus = tuple(links.in_order(node.gpus))
    running = tuple(sorted(node.running, key=attrgetter("instance_id")))
    sorted_already = gpus == node.gpus and running == node.running
    return node if sorted_already else replace(node, gpus=gpus, running=running)
