"""The threads that act for the instances of a node, and how many of them one project may use."""

from dataclasses import dataclass
from typing import Final

from mooring.agent.sync.workers import Workers

# What one project may have waiting in a pool; the rest is decided again when something of it is done.
WAITING_OF_PROJECT: Final = 128
PULLS_OF_PROJECT: Final = 2
STREAMS_OF_PROJECT: Final = 32  # twice what one replica of the control plane lets pass


@dataclass(frozen=True, slots=True)
class WorkerPools:
    """The threads that act, shared fairly among projects. Nodes of one process may share them."""

    pulls: Workers
    starts: Workers
    endings: Workers
    releases: Workers
    streams: Workers

    @classmethod
    def default(cls) -> "WorkerPools":
        """Limits are for all projects together, and for each.

        A pull may take an hour and a stream days, so few of one project leave many threads to the others.
        Each call of a start or an ending has a deadline of seconds, and a release one of half a minute.
        """
        waiting = WAITING_OF_PROJECT
        return cls(
            pulls=Workers("pull", 16, each=PULLS_OF_PROJECT, waiting=waiting),
            starts=Workers("start", 32, each=8, waiting=waiting),
            endings=Workers("end", 32, each=8, waiting=waiting),
            releases=Workers("release", 128, each=32, waiting=waiting),
            streams=Workers("stream", 256, each=STREAMS_OF_PROJECT, waiting=STREAMS_OF_PROJECT),
        )
