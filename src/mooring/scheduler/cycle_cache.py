"""State that speeds up the next scheduling cycle and does not change its result."""

from collections.abc import Sequence

from mooring.scheduler.backfill.planner import StartTimes
from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.feasibility.node_groups import NodeGroups
from mooring.scheduler.model import NodeView
from mooring.scheduler.units import PendingUnits


class CycleCache:
    """Only one cycle may use it at a time. A new cache gives the same results, more slowly."""

    def __init__(self) -> None:
        self.units = PendingUnits()
        self._begin()

    def _begin(self) -> None:
        self.cluster = ClusterState()
        self.start_times = StartTimes(self.cluster)
        self.node_groups = NodeGroups(self.cluster)

    def update(self, nodes: Sequence[NodeView]) -> None:
        """Replace the nodes by those of the current snapshot."""
        if self.cluster.should_rebuild(len(nodes)):
            self._begin()
        self.cluster.update(nodes)
