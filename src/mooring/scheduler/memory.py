"""What is remembered between two looks. It makes them faster and changes nothing else."""

from collections.abc import Sequence

from mooring.scheduler.backfill import Starts
from mooring.scheduler.census import Census
from mooring.scheduler.model import NodeView
from mooring.scheduler.world import World


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
