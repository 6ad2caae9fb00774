"""The expected waste of a node state: the free GPU capacity that the expected requests cannot use.

The waste is the sum of three kinds, each in thousandths of a GPU and averaged over the workload:

- *stranded* (the fragment of FGD): what the next request cannot use, because the node lacks CPUs or whole
  GPUs for it, or the free part of a GPU is too small.
- *unfilled*: what repeated requests of one shape would leave. Eight free GPUs beside 20 CPUs can host the
  next request, but most of them are waste.
- *worthless*: free parts of shared GPUs less their value at cutting-stock prices, see `share_values`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooring.scheduler.packing.shapes import NodeClass, Shape
from mooring.scheduler.packing.states import Bools, Ints, States
from mooring_client.schemas.spec import WHOLE_MILLI

# Weights are whole numbers, so that sums do not depend on order or batch.
UNIT = 1 << 16
_PLENTY = 1 << 20
# States in a batch: few enough that intermediate arrays fit the processor's cache.
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Target:
    """An expected shape, and the weights of two kinds of waste for it."""

    shape: Shape
    stranded: float = 0.0
    unfilled: float = 0.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What each target needs on each node class: a row per target, a column per class number."""

    cpu_milli: Ints
    hosts: Bools  # whether the class has a model that the target accepts


class Potential:
    """The waste of states. Immutable: fleets that number their classes differently may share it."""

    def __init__(
        self, targets: Sequence[Target] = (), values: NDArray[np.int64] | None = None, worthless: float = 0.0
    ) -> None:
        """
        Args:
            values: of 0..1000 free thousandths of a GPU, see `share_values.free_milli_values`.
            worthless: the weight of the difference between what is free and its value.
        """
        with_gpus = [target for target in targets if target.shape.gpus]
        self._shapes = [target.shape for target in with_gpus]
        self._gpus = np.array([shape.gpus for shape in self._shapes], np.int64)[:, None]
        self._several = any(shape.gpus > 1 for shape in self._shapes)
        self._amount = np.array([shape.gpus * shape.gpu_milli for shape in self._shapes], np.int64)[:, None]
        self._stranded = np.array([_in_units(target.stranded) for target in with_gpus], np.int64)
        self._unfilled = np.array([_in_units(target.unfilled) for target in with_gpus], np.int64)
        # For requests without GPUs, every free GPU is stranded.
        self._always = sum(_in_units(target.stranded) for target in targets if not target.shape.gpus)
        sizes = sorted({shape.gpu_milli for shape in self._shapes})
        self._size = np.array([sizes.index(shape.gpu_milli) for shape in self._shapes], np.int64)
        gpu_free = np.arange(WHOLE_MILLI + 1)
        # By size and free thousandths: how many requests fit, and what is free if none does.
        self._copies = np.array([gpu_free // size for size in sizes], np.int64).reshape(
            len(sizes), WHOLE_MILLI + 1
        )
        self._small = np.where(self._copies == 0, gpu_free, 0)
        self._worthless = _in_units(worthless) * (gpu_free - (gpu_free if values is None else values))

    def needs(self, classes: Sequence[NodeClass]) -> Needs:
        cpu = [[shape.takes(node_class)[0] for node_class in classes] for shape in self._shapes]
        hosts = [[_can_host(node_class, shape) for node_class in classes] for shape in self._shapes]
        # Without shapes, the number of columns would be lost.
        size = len(self._shapes), len(classes)
        return Needs(np.array(cpu, np.int64).reshape(size), np.array(hosts, np.bool_).reshape(size))

    def of(self, states: States, needs: Needs) -> Ints:
        """The waste of each state, in thousandths of a GPU times `UNIT`."""
        batches = [
            self._of(needs, states.rows(np.arange(first, min(first + _BATCH, len(states)))))
            for first in range(0, len(states), _BATCH)
        ]
        return np.concatenate(batches) if batches else np.zeros(0, np.int64)

    def _of(self, needs: Needs, states: States) -> Ints:
        gpu_free = np.abs(states.gpu_free)
        total = gpu_free.sum(axis=1)
        waste: Ints = self._worthless.take(gpu_free).sum(axis=1) + self._always * total
        if self._shapes:
            copies = self._copies.take(gpu_free, axis=1).sum(axis=2).take(self._size, axis=0)
            if self._several:
                copies //= self._gpus
            copies = np.minimum(copies, _by_cpu(needs, states)) * needs.hosts.take(states.classes, axis=1)
            small = self._small.take(gpu_free, axis=1).sum(axis=2).take(self._size, axis=0)
            waste += self._stranded @ np.where(copies > 0, small, total)
            waste += self._unfilled @ (total - copies * self._amount)
        return waste


def _by_cpu(needs: Needs, states: States) -> Ints:
    """How many of each target the free CPUs of each state can host."""
    needed = needs.cpu_milli.take(states.classes, axis=1)
    by_cpu = np.maximum(0, states.cpu_milli) // np.maximum(1, needed)
    return np.where(needed > 0, by_cpu, _PLENTY)


def _in_units(weight: float) -> int:
    return round(weight * UNIT)


def _can_host(node_class: NodeClass, shape: Shape) -> bool:
    return not shape.models or not shape.models.isdisjoint(node_class.models)
