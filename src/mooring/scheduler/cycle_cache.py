"""What is remembered between two looks. It makes them faster and changes nothing else."""

from collections.abc import Sequence

from mooring.scheduler.backfill.planner import Starts
from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.feasibility.node_groups import NodeGroups
from mooring.scheduler.model import NodeView


class CycleCache:
    """Used by one look at a time. A new one is as good, and slower."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.world = ClusterState()
        self.starts = Starts(self.world)
        self.census = NodeGroups(self.world)

    def look(self, nodes: Sequence[NodeView]) -> None:
        """These are the nodes now."""
        if self.world.outworn(len(nodes)):
            self._begin()
        self.world.look(nodes)
