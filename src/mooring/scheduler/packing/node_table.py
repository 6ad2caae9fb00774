"""What every node of the fleet has left, and a note of each change."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.packing.shapes import TIE_BITS, FleetNode, Shape, tie_of
from mooring.scheduler.packing.states import Ints, StateTable

# Who has not looked for so many changes looks at every node again.
MAX_NOTES = 65_536
# A node's rank among those that are equally good: by the size of its GPUs, the smallest first, and its tie.
_SIZE_BITS = 8
RANK_BITS = _SIZE_BITS + TIE_BITS

_NO_KIND = -1


class NodeTable:
    """Nodes by index. An index is used for one node only, also when the node has been removed."""

    def __init__(self) -> None:
        self.table = StateTable()
        self.ids: list[str] = []
        self.indexes: dict[str, int] = {}
        self._kinds: list[int] = []
        self._cpu: list[int] = []
        self._rests: list[list[int]] = []
        self._owners: list[list[str]] = []
        self._ties: list[int] = []
        self._sizes: list[int] = []  # of the smallest GPUs of all classes, the smallest first
        self.kinds = np.zeros(64, np.int64)
        self.memory = np.zeros(64, np.int64)  # MiB free
        self.states = np.zeros(64, np.int64)  # for a request without an owner
        self.ranks = np.zeros(64, np.int64)  # the highest is preferred; of `RANK_BITS`
        self.here = np.zeros(64, np.bool_)
        self.shared: set[int] = set()  # nodes with a GPU that is somebody's in part
        self._notes: list[int] = []
        self.noted = 0  # changes ever noted

    def __len__(self) -> int:
        return len(self.ids)

    def node(self, index: int) -> FleetNode:
        return FleetNode(
            self.ids[index],
            self.table.kinds[self._kinds[index]].value,
            self._cpu[index],
            int(self.memory[index]),
            tuple(self._rests[index]),
            tuple(self._owners[index]),
        )

    def put(self, node: FleetNode) -> None:
        """The node is now so, whatever it was."""
        index = self.indexes.get(node.id)
        if index is None:
            index = self._add(node)
        kind = self.table.kind(node.kind)
        if kind != self._kinds[index]:
            self.kinds[index] = self._kinds[index] = kind
            self._rank(index)
        self._cpu[index] = node.cpu_milli_free
        self._rests[index] = list(node.gpu_milli_free)
        self._owners[index] = list(node.owners or [""] * len(node.gpu_milli_free))
        self.memory[index] = node.memory_mib_free
        self._changed(index)

    def remove(self, node_id: str) -> None:
        """KeyError if it is not there."""
        index = self.indexes.pop(node_id)
        self.here[index] = False
        self.shared.discard(index)
        self._note(index)

    def change(self, index: int, gpus: Iterable[int], shape: Shape, sign: int) -> None:
        """Take (-1) or give back (+1) what a request has there.

        Raises:
            ValueError: more than there is, or was taken, or somebody else's; nothing has changed then.
        """
        kind = self.table.kinds[self._kinds[index]].value
        cpu_milli, memory_mib = (sign * amount for amount in shape.takes(kind))
        rests, owners = list(self._rests[index]), list(self._owners[index])
        for place in gpus:
            if sign < 0 and shape.share and owners[place] not in {"", shape.owner}:
                raise ValueError(f"GPU {place} of {self.ids[index]} is shared out to somebody else")
            rests[place] += sign * shape.gpu_milli
            owners[place] = (
                (owners[place] or shape.owner) if shape.share and rests[place] < WHOLE_MILLI else ""
            )
        cpu_left, memory_left = self._cpu[index] + cpu_milli, int(self.memory[index]) + memory_mib
        if sign < 0 and min(cpu_left, memory_left, *rests) < 0:
            raise ValueError(f"{self.ids[index]} has not that much left")
        if max(rests, default=0) > WHOLE_MILLI:
            raise ValueError(f"more is given back than was taken of {self.ids[index]}")
        self._cpu[index], self.memory[index] = cpu_left, memory_left
        self._rests[index], self._owners[index] = rests, owners
        self._changed(index)

    def rests_for(self, index: int, shape: Shape, blocked: Collection[int] = ()) -> list[int]:
        """What is left of the GPUs, by place; below 0 where it is closed to the shape."""
        rests, owners = self._rests[index], self._owners[index]
        if shape.share and index in self.shared:
            return [
                -rest if place in blocked or owners[place] not in {"", shape.owner} else rest
                for place, rest in enumerate(rests)
            ]
        return [-rest if place in blocked else rest for place, rest in enumerate(rests)] if blocked else rests

    def state_for(self, index: int, rests: Sequence[int]) -> int:
        """The node's state if this is left of its GPUs."""
        return self.table.number(self._kinds[index], self._cpu[index], rests)

    def places(self, index: int, rests: Sequence[int], positions: Iterable[int]) -> tuple[int, ...]:
        """Where on the node the GPUs are that stand at these positions of the state with these rests."""
        group = self.table.kinds[self._kinds[index]].group
        order = sorted(range(len(rests)), key=lambda place: (group[place], rests[place], place))
        return tuple(sorted(order[position] for position in positions))

    def since(self, seen: int) -> Ints:
        """The nodes that changed after so many changes; all, where that is not known any more."""
        missed = self.noted - seen
        if seen < 0 or missed > len(self._notes):
            return np.arange(len(self))
        return np.array(list(set(self._notes[len(self._notes) - missed :])), np.int64)

    def renumber(self) -> None:
        """Forget the states that no node is in."""
        self.table.clear()
        for index in self.indexes.values():
            self._changed(index)

    def _changed(self, index: int) -> None:
        self.states[index] = self.table.number(self._kinds[index], self._cpu[index], self._rests[index])
        if any(self._owners[index]):
            self.shared.add(index)
        else:
            self.shared.discard(index)
        self._note(index)

    def _rank(self, index: int) -> None:
        size = self.table.kinds[self._kinds[index]].size
        if size not in self._sizes:
            insort(self._sizes, size)
            for known in range(len(self)):
                self._rank(known)
                self._note(known)
            return
        larger = len(self._sizes) - 1 - bisect_left(self._sizes, size)
        self.ranks[index] = (min(larger, (1 << _SIZE_BITS) - 1) << TIE_BITS) + self._ties[index]

    def _note(self, index: int) -> None:
        self._notes.append(index)
        self.noted += 1
        if len(self._notes) > 2 * MAX_NOTES:
            del self._notes[:MAX_NOTES]

    def _add(self, node: FleetNode) -> int:
        index = len(self.ids)
        if index == len(self.here):
            for name in ("kinds", "memory", "states", "ranks", "here"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.indexes[node.id] = index
        self.ids.append(node.id)
        self._kinds.append(_NO_KIND)
        self._cpu.append(0)
        self._rests.append([])
        self._owners.append([])
        self._ties.append(tie_of(node.id))
        self.here[index] = True
        return index
