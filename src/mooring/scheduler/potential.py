"""What a state of a node wastes: the GPUs that the workload expected cannot use there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooring.scheduler.shapes import NodeClass, Shape
from mooring.scheduler.states import States


@dataclass(frozen=True, slots=True)
class Target:
    """A shape that is expected, and the part of the requests that have it."""

    shape: Shape
    weight: float


class Potential:
    """The waste of states, in thousandths of a GPU. Immutable but for classes met later."""

    def __init__(self, targets: Sequence[Target] = ()) -> None:
        self._targets = tuple(targets)

    def of(self, states: States, kinds: Sequence[NodeClass]) -> NDArray[np.float64]:
        """The expected waste of each state."""
        rests = np.abs(states.rests)
        total = rests.sum(axis=1)
        waste = np.zeros(len(states))
        for target in self._targets:
            shape = target.shape
            hosts = np.array([not shape.models or not shape.models.isdisjoint(k.models) for k in kinds])
            cpu = np.array([shape.takes(kind)[0] for kind in kinds])
            large = rests >= shape.gpu_milli
            can = hosts[states.kinds] & (states.cpu_milli >= cpu[states.kinds]) & (shape.gpus > 0)
            can &= large.sum(axis=1) >= shape.gpus
            waste += target.weight * np.where(can, (rests * ~large).sum(axis=1), total)
        return waste
