# Generated from aio/resources/queue.py: change that file, and run `make client`.
"""The queue: pending instances in scheduling order, and what fits now."""

from collections.abc import Sequence

from mooring_client.answers import model
from mooring_client.calls import Call
from mooring_client.schemas.queue import Fragmentation, ProjectShare, Queue, QueueEntry
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class PendingQueue(Resource):
    """Pending instances in scheduling order: `client.queue`."""

    def list(self, *, limit: int | None = None) -> Pages[QueueEntry]:
        """List the pending instances of all projects, the next one first."""
        return Pages(self._transport, _call(limit))

    def shares(self) -> Sequence[ProjectShare]:
        """The shares of your projects, which decide the order; admins see all."""
        answer = self._transport.send(_call(1))
        return answer.shares

    def fragmentation(self) -> Fragmentation:
        """Which sizes of requests fit now, and why free GPUs cannot be used."""
        return self._transport.send(
            Call(
                operation="get_fragmentation",
                method="GET",
                path="/v1/cluster/fragmentation",
                read=model(Fragmentation),
            )
        )


def _call(limit: int | None) -> Call[Queue]:
    return Call(
        operation="get_queue", method="GET", path="/v1/queue", read=model(Queue), params={"limit": limit}
    )
