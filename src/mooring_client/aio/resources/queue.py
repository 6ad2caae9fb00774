"""The queue: pending instances in scheduling order, and what fits now."""

from collections.abc import Sequence

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model
from mooring_client.calls import Call
from mooring_client.schemas.queue import Fragmentation, ProjectShare, Queue, QueueEntry


class AsyncPendingQueue(AsyncResource):
    """Pending instances in scheduling order: `client.queue`."""

    def list(self, *, limit: int | None = None) -> AsyncPages[QueueEntry]:
        """List the pending instances of all projects, the next one first."""
        return AsyncPages(self._transport, _call(limit))

    async def shares(self) -> Sequence[ProjectShare]:
        """The shares of your projects, which decide the order; admins see all."""
        answer = await self._transport.send(_call(1))
        return answer.shares

    async def fragmentation(self) -> Fragmentation:
        """Which sizes of requests fit now, and why free GPUs cannot be used."""
        return await self._transport.send(
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
