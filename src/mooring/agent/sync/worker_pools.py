"""The worker pools of a node, and how many threads one project may use."""

from dataclasses import dataclass
from typing import Final

from mooring.agent.sync.workers import Workers

# Queued tasks of one project in a pool. Further actions are not begun, but planned again later.
WAITING_OF_PROJECT: Final = 128
PULLS_OF_PROJECT: Final = 2


@dataclass(frozen=True, slots=True)
class WorkerPools:
    """One pool per type of work, shared fairly among projects. Nodes of a process may share them."""

    pulls: Workers
    starts: Workers
    endings: Workers
    releases: Workers

    @classmethod
    def default(cls) -> "WorkerPools":
        """Pools with limits for all projects together, and for each project.

        A pull may take an hour, so a project may use only an eighth of these threads.
        Each call of a start or an ending has a timeout of seconds, and a release one of half a minute.
        """
        waiting = WAITING_OF_PROJECT
        return cls(
            pulls=Workers("pull", 16, each=PULLS_OF_PROJECT, waiting=waiting),
            starts=Workers("start", 32, each=8, waiting=waiting),
            endings=Workers("end", 32, each=8, waiting=waiting),
            releases=Workers("release", 128, each=32, waiting=waiting),
        )

    @classmethod
    def of_simulated_nodes(cls) -> "WorkerPools":
        """Fewer threads, for up to a thousand nodes: no work on a simulated node takes long."""
        waiting = WAITING_OF_PROJECT
        return cls(
            pulls=Workers("pull", 4, each=PULLS_OF_PROJECT, waiting=waiting),
            starts=Workers("start", 12, each=8, waiting=waiting),
            endings=Workers("end", 8, each=4, waiting=waiting),
            releases=Workers("release", 8, each=4, waiting=waiting),
        )
