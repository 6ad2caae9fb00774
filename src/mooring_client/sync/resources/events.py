# Generated from aio/resources/events.py: change that file, and run `make client`.
"""Events: all changes, in order."""

from collections.abc import Iterator

from mooring_client.answers import model, read_object
from mooring_client.calls import Call
from mooring_client.schemas.events import Event, EventList
from mooring_client.sync.following import followed
from mooring_client.sync.resources.base import Resource


class Events(Resource):
    """All changes, in order: `client.events`."""

    def page(
        self,
        *,
        after: int | None = None,
        newest: bool | None = None,
        limit: int | None = None,
        wait_s: float | None = None,
    ) -> EventList:
        """Read events after a `seq`, oldest first.

        Args:
            newest: read after the newest event, not after `after`. The answer's `last_seq` is then where to
                follow from.
            wait_s: how long to wait for the first one, at most 60.
        """
        return self._transport.send(_call(after, newest, limit, wait_s))

    def follow(self, after: int = 0) -> Iterator[Event]:
        """Yield every event after a `seq`, for ever: each once, in order, also after a lost connection.

        Raises:
            Gone: the events after this `seq` are no longer stored.
        """
        for data in followed(self._transport, _call(None, None, None, None), str(after), ends=False):
            yield read_object(Event, data)


def _call(after: int | None, newest: bool | None, limit: int | None, wait_s: float | None) -> Call[EventList]:
    return Call(
        operation="list_events",
        method="GET",
        path="/v1/events",
        read=model(EventList),
        params={"after": after, "newest": newest, "limit": limit, "wait_s": wait_s},
        extra_s=wait_s or 0,
    )
