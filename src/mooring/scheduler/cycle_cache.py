"""What is remembered between two looks. It makes them faster and changes nothing else."""

from collections.abc import Sequence

from mooring.scheduler.backfill.planner import Starts
from mooring.scheduler.cluster import World
from mooring.scheduler.feasibility.node_groups import Census
from mooring.scheduler.model import NodeView


class Memory:
    """Used by one look at a time. A new one is as good, and slower."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.world = World()
        self.starts = Starts(self.world)
        self.census = Census(self.world)

    def look(self, nodes: Sequence[NodeView]) -> None:
        """These are the nodes now."""
        if self.world.outworn(len(nodes)):
            self._begin()
        self.world.look(nodes)
