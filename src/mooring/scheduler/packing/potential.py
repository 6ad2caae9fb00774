"""What a state of a node is worth less than the GPUs that are free there: what is expected cannot use them.

Three kinds of waste, each in thousandths of a GPU and expected over the workload, added up:

- *stranded* (the fragment of FGD): what the next request cannot use, because the node lacks CPUs or whole
  GPUs for it, or a rest is too small for it.
- *unfilled*: what repeated requests of one kind would leave. Eight free GPUs beside 20 CPUs can host the next
  request, and still most of them are waste.
- *worthless*: rests of shared GPUs at the prices of the cutting-stock problem, see `prices`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.packing.shapes import NodeClass, Shape
from mooring.scheduler.packing.states import Bools, Ints, States

# Sums are of whole numbers, so that they are the same in whatever order and batch they are added up.
UNIT = 1 << 16
_PLENTY = 1 << 20
# Of each batch, so that what is in between fits the processor's cache.
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Target:
    """A shape that is expected, and how much its waste counts."""

    shape: Shape
    stranded: float = 0.0
    unfilled: float = 0.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What each target needs of each class of nodes, numbered as in the states to be judged."""

    cpu_milli: Ints
    hosts: Bools


class Potential:
    """The waste of states. Immutable: fleets that number their classes differently may share it."""

    def __init__(
        self, targets: Sequence[Target] = (), worth: NDArray[np.int64] | None = None, worthless: float = 0.0
    ) -> None:
        """
        Args:
            worth: of a rest of 0..1000 thousandths of a GPU, see `prices.worth_of_rests`.
            worthless: how much the difference between a rest and its worth counts.
        """
        with_gpus = [target for target in targets if target.shape.gpus]
        self._shapes = [target.shape for target in with_gpus]
        self._gpus = np.array([shape.gpus for shape in self._shapes], np.int64)[:, None]
        self._several = any(shape.gpus > 1 for shape in self._shapes)
        self._amount = np.array([shape.gpus * shape.gpu_milli for shape in self._shapes], np.int64)[:, None]
        self._stranded = np.array([_units(target.stranded) for target in with_gpus], np.int64)
        self._unfilled = np.array([_units(target.unfilled) for target in with_gpus], np.int64)
        # For what asks for no GPU every free one is stranded, always.
        self._always = sum(_units(target.stranded) for target in targets if not target.shape.gpus)
        sizes = sorted({shape.gpu_milli for shape in self._shapes})
        self._size = np.array([sizes.index(shape.gpu_milli) for shape in self._shapes], np.int64)
        rests = np.arange(WHOLE_MILLI + 1)
        # By size and rest: how often the size goes into the rest, and the rest where it does not.
        self._copies = np.array([rests // size for size in sizes], np.int64).reshape(
            len(sizes), WHOLE_MILLI + 1
        )
        self._small = np.where(self._copies == 0, rests, 0)
        self._lost = (
            np.zeros(WHOLE_MILLI + 1, np.int64) if worth is None else _units(worthless) * (rests - worth)
        )

    def needs(self, kinds: Sequence[NodeClass]) -> Needs:
        cpu = [[shape.takes(kind)[0] for kind in kinds] for shape in self._shapes]
        hosts = [[_may_host(kind, shape) for kind in kinds] for shape in self._shapes]
        # With no shapes at all the number of columns would be forgotten.
        size = len(self._shapes), len(kinds)
        return Needs(np.array(cpu, np.int64).reshape(size), np.array(hosts, np.bool_).reshape(size))

    def of(self, states: States, needs: Needs) -> Ints:
        """The waste of each state, in thousandths of a GPU times `UNIT`."""
        batches = [
            self._of(needs, states.rows(np.arange(first, min(first + _BATCH, len(states)))))
            for first in range(0, len(states), _BATCH)
        ]
        return np.concatenate(batches) if batches else np.zeros(0, np.int64)

    def _of(self, needs: Needs, states: States) -> Ints:
        rests = np.abs(states.rests)
        total = rests.sum(axis=1)
        waste: Ints = self._lost.take(rests).sum(axis=1) + self._always * total
        if self._shapes:
            copies = self._copies.take(rests, axis=1).sum(axis=2).take(self._size, axis=0)
            if self._several:
                copies //= self._gpus
            copies = np.minimum(copies, _by_cpu(needs, states)) * needs.hosts.take(states.kinds, axis=1)
            small = self._small.take(rests, axis=1).sum(axis=2).take(self._size, axis=0)
            waste += self._stranded @ np.where(copies > 0, small, total)
            waste += self._unfilled @ (total - copies * self._amount)
        return waste


def _by_cpu(needs: Needs, states: States) -> Ints:
    """How many of each target the free CPUs of each state are enough for."""
    needed = needs.cpu_milli.take(states.kinds, axis=1)
    by_cpu = np.maximum(0, states.cpu_milli) // np.maximum(1, needed)
    return np.where(needed > 0, by_cpu, _PLENTY)


def _units(weight: float) -> int:
    return round(weight * UNIT)


def _may_host(kind: NodeClass, shape: Shape) -> bool:
    return not shape.models or not shape.models.isdisjoint(kind.models)
