"""Pages of events, read once for all that ask for the same page at the same time.

An event wakes every stream and long poll of its project; all of them have read the same events before.
"""

import asyncio
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from mooring.api import views
from mooring.control import events
from mooring.db.session import Database
from mooring.schemas.base import Json

_Asked = tuple[frozenset[str] | None, int, int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A read that goes on.

    Attributes:
        fired: how often its topics had fired when it began: what fired later it may not have seen.
    """

    fired: tuple[int, ...]
    items: asyncio.Future[list[Json]]


class EventPages:
    """For the event loop's thread only."""

    def __init__(self) -> None:
        self._reads: dict[_Asked, _Read] = {}

    async def page(
        self, database: Database, projects: frozenset[str] | None, after: int, limit: int
    ) -> list[Json]:
        """As `events.page`, for callers that have subscribed to `events.topics(projects)`.

        Raises:
            Gone: as `events.page`.
        """
        asked = (projects, after, limit)
        fired = database.signals.fired(*events.topics(projects))
        read = self._reads.get(asked)
        if read is None or read.fired != fired:
            read = _Read(fired, asyncio.ensure_future(run_in_threadpool(_page, database, asked)))
            self._reads[asked] = read
            read.items.add_done_callback(lambda _ended: self._forget(asked, read))
        return await asyncio.shield(read.items)

    def _forget(self, asked: _Asked, read: _Read) -> None:
        if not read.items.cancelled():
            read.items.exception()  # somebody may have asked who is gone
        if self._reads.get(asked) is read:
            del self._reads[asked]


def _page(database: Database, asked: _Asked) -> list[Json]:
    projects, after, limit = asked
    with database.read() as session:
        found = events.page(session, after=after, limit=limit, projects=projects)
        return [views.event(row) for row in found]
