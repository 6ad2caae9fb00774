"""Pages of events, read once for all that ask for the same page.

An event wakes every stream and long poll of its project, and most of them have read the same events before.
Their turns come one after the other, so that a thousand of them keep no other request waiting.
"""

import asyncio
import time
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from mooring.api import views
from mooring.api.turns import ProjectTurns
from mooring.control import events
from mooring.core.access import Access
from mooring.db.session import Database
from mooring.schemas.base import Json

# Followers that one event has woken have had their turn by then.
_KEPT_S = 1.0
# Where much happens, a page may lack what happened in this time: its readers come back for the rest.
_FRESH_S = 0.25

_Asked = tuple[frozenset[str] | None, int, int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A page that was read.

    Attributes:
        fired: the numbers of its topics when it began (`Signals.fired`): what happened later is not in it.
        began: when that was, by the monotonic clock.
    """

    fired: tuple[int, ...]
    began: float
    items: list[Json]

    def serves(self, fired: tuple[int, ...]) -> bool:
        """Whether it is as good as a read that begins now.

        Who gets nothing waits to be woken by what comes next, so nothing may have happened since it began.
        """
        if self.fired == fired and 0 not in fired:
            return True
        return bool(self.items) and time.monotonic() - self.began < _FRESH_S


class EventPages:
    """For the event loop's thread only."""

    def __init__(self) -> None:
        self._reads: dict[_Asked, _Read] = {}
        self._turns = ProjectTurns(at_once=1)

    async def page(
        self, database: Database, access: Access, after: int, limit: int, *, woken: bool = False
    ) -> list[Json]:
        """As `events.page`; those who get nothing may wait for the topics if they subscribed to them before.

        Args:
            woken: this is not the first page of a request, so that it may be what another one has just read.

        Raises:
            Gone: as `events.page`.
            TooManyRequests: as `ProjectTurns.taken`.
        """
        async with self._turns.taken(access.caller):
            asked = (access.projects, after, limit)
            fired = database.signals.fired(*events.topics(access.projects))
            read = self._reads.get(asked)
            if not woken or read is None or not read.serves(fired):
                began = time.monotonic()
                read = _Read(fired, began, await run_in_threadpool(_page, database, asked))
                self._reads[asked] = read
                asyncio.get_running_loop().call_later(_KEPT_S, self._forget, asked, read)
            return read.items

    def _forget(self, asked: _Asked, read: _Read) -> None:
        if self._reads.get(asked) is read:
            del self._reads[asked]


def _page(database: Database, asked: _Asked) -> list[Json]:
    projects, after, limit = asked
    with database.read() as session:
        found = events.page(session, after=after, limit=limit, projects=projects)
        return [views.event(row) for row in found]
