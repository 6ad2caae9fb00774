"""The free resources of each node of the fleet, and a log of changes."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mooring.scheduler.packing.shapes import TIE_BITS, FleetNode, Shape, tie_of
from mooring.scheduler.packing.states import Ints, StateTable
from mooring_client.schemas.spec import WHOLE_MILLI

# A reader that has missed more changes than this reads every node again.
MAX_LOGGED = 65_536
# A node's rank among equally good ones: the smallest GPUs first, then the highest tie.
_SIZE_BITS = 8
RANK_BITS = _SIZE_BITS + TIE_BITS

_NO_CLASS = -1


class NodeTable:
    """Nodes by index. The index of a removed node is not used again."""

    def __init__(self) -> None:
        self.table = StateTable()
        self.ids: list[str] = []
        self.indexes: dict[str, int] = {}
        self._classes: list[int] = []
        self._cpu: list[int] = []
        self._gpu_free: list[list[int]] = []
        self._owners: list[list[str]] = []
        self._ties: list[int] = []
        self._sizes: list[int] = []  # distinct sizes of the classes' smallest GPUs, ascending
        self.classes = np.zeros(64, np.int64)
        self.memory = np.zeros(64, np.int64)  # MiB free
        self.states = np.zeros(64, np.int64)  # of a node for a request without an owner
        self.ranks = np.zeros(64, np.int64)  # of `RANK_BITS`; the highest is preferred
        self.present = np.zeros(64, np.bool_)
        self.shared: set[int] = set()  # nodes with a shared GPU
        self._log: list[int] = []
        self.change_count = 0  # in total

    def __len__(self) -> int:
        return len(self.ids)

    def node(self, index: int) -> FleetNode:
        return FleetNode(
            self.ids[index],
            self.table.layouts[self._classes[index]].node_class,
            self._cpu[index],
            int(self.memory[index]),
            tuple(self._gpu_free[index]),
            tuple(self._owners[index]),
        )

    def put(self, node: FleetNode) -> None:
        """Add or replace a node."""
        index = self.indexes.get(node.id)
        if index is None:
            index = self._add(node)
        class_number = self.table.class_number(node.node_class)
        if class_number != self._classes[index]:
            self.classes[index] = self._classes[index] = class_number
            self._set_rank(index)
        self._cpu[index] = node.cpu_milli_free
        self._gpu_free[index] = list(node.gpu_milli_free)
        self._owners[index] = list(node.owners or [""] * len(node.gpu_milli_free))
        self.memory[index] = node.memory_mib_free
        self._update(index)

    def remove(self, node_id: str) -> None:
        """Raises KeyError if there is no such node."""
        index = self.indexes.pop(node_id)
        self.present[index] = False
        self.shared.discard(index)
        self._log_change(index)

    def change(self, index: int, gpus: Iterable[int], shape: Shape, sign: int) -> None:
        """Allocate (-1) or release (+1) what a request uses on a node.

        Raises:
            ValueError: more than is free, more of a GPU than was allocated, or a GPU that another owner
                shares; nothing has changed.
        """
        node_class = self.table.layouts[self._classes[index]].node_class
        cpu_milli, memory_mib = (sign * amount for amount in shape.takes(node_class))
        gpu_free, owners = list(self._gpu_free[index]), list(self._owners[index])
        for place in gpus:
            if sign < 0 and shape.share and owners[place] not in {"", shape.owner}:
                raise ValueError(f"GPU {place} of {self.ids[index]} is shared by another owner")
            gpu_free[place] += sign * shape.gpu_milli
            shared = shape.share and gpu_free[place] < WHOLE_MILLI
            owners[place] = (owners[place] or shape.owner) if shared else ""
        cpu_after, memory_after = self._cpu[index] + cpu_milli, int(self.memory[index]) + memory_mib
        if sign < 0 and min(cpu_after, memory_after, *gpu_free) < 0:
            raise ValueError(f"{self.ids[index]} does not have that much free")
        if max(gpu_free, default=0) > WHOLE_MILLI:
            raise ValueError(f"{self.ids[index]}: more is released than was allocated")
        self._cpu[index], self.memory[index] = cpu_after, memory_after
        self._gpu_free[index], self._owners[index] = gpu_free, owners
        self._update(index)

    def gpu_free_for(self, index: int, shape: Shape, blocked: Collection[int] = ()) -> list[int]:
        """What is free of each GPU, by place; negated where the shape may not use the GPU."""
        gpu_free, owners = self._gpu_free[index], self._owners[index]
        if shape.share and index in self.shared:
            return [
                -free if place in blocked or owners[place] not in {"", shape.owner} else free
                for place, free in enumerate(gpu_free)
            ]
        if not blocked:
            return gpu_free
        return [-free if place in blocked else free for place, free in enumerate(gpu_free)]

    def state_for(self, index: int, gpu_free: Sequence[int]) -> int:
        """The number of the node's state if this is free on its GPUs."""
        return self.table.number(self._classes[index], self._cpu[index], gpu_free)

    def places(self, index: int, gpu_free: Sequence[int], positions: Iterable[int]) -> tuple[int, ...]:
        """The places on the node of the GPUs at these positions of the state."""
        group = self.table.layouts[self._classes[index]].group
        order = sorted(range(len(gpu_free)), key=lambda place: (group[place], gpu_free[place], place))
        return tuple(sorted(order[position] for position in positions))

    def changed_since(self, seen: int) -> Ints:
        """The nodes that changed after change number `seen`; all nodes if the log is too short."""
        behind = self.change_count - seen
        if seen < 0 or behind > len(self._log):
            return np.arange(len(self))
        return np.array(list(set(self._log[len(self._log) - behind :])), np.int64)

    def renumber(self) -> None:
        """Drop the states that no node is in."""
        self.table.clear()
        for index in self.indexes.values():
            self._update(index)

    def _update(self, index: int) -> None:
        self.states[index] = self.table.number(self._classes[index], self._cpu[index], self._gpu_free[index])
        if any(self._owners[index]):
            self.shared.add(index)
        else:
            self.shared.discard(index)
        self._log_change(index)

    def _set_rank(self, index: int) -> None:
        size = self.table.layouts[self._classes[index]].size
        if size not in self._sizes:
            insort(self._sizes, size)
            for known in range(len(self)):
                self._set_rank(known)
                self._log_change(known)
            return
        larger = len(self._sizes) - 1 - bisect_left(self._sizes, size)
        self.ranks[index] = (min(larger, (1 << _SIZE_BITS) - 1) << TIE_BITS) + self._ties[index]

    def _log_change(self, index: int) -> None:
        self._log.append(index)
        self.change_count += 1
        if len(self._log) > 2 * MAX_LOGGED:
            del self._log[:MAX_LOGGED]

    def _add(self, node: FleetNode) -> int:
        index = len(self.ids)
        if index == len(self.present):
            for name in ("classes", "memory", "states", "ranks", "present"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.indexes[node.id] = index
        self.ids.append(node.id)
        self._classes.append(_NO_CLASS)
        self._cpu.append(0)
        self._gpu_free.append([])
        self._owners.append([])
        self._ties.append(tie_of(node.id))
        self.present[index] = True
        return index
