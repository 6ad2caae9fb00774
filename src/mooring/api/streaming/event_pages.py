"""Pages of events, read once for all that ask for the same events.

An event wakes every stream and long poll of its project, and most of them have read the same events before.
Their turns come one after the other, so that a thousand of them keep no other request waiting.
"""

import asyncio
import time
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from mooring.api.http.turns import ProjectTurns
from mooring.api.streaming import sse
from mooring.api.views.show import show
from mooring.control import events
from mooring.core.access import Access
from mooring.db.session import Database
from mooring.schemas.base import Json
from mooring.schemas.events import Event

# Followers that one event has woken have had their turn by then.
_KEPT_S = 1.0
# Where much happens, a page may lack what happened in this time: its readers come back for the rest.
_FRESH_S = 0.25

_Asked = tuple[frozenset[str] | None, int]  # the projects, and how many events


@dataclass(slots=True)
class PageEvent:
    """An event of a page that many read."""

    item: Json
    _frame: bytes | None = None

    @property
    def frame(self) -> bytes:
        """As one of a stream; made once for all of them."""
        if self._frame is None:
            self._frame = sse.frame(self.item, self.item["seq"])
        return self._frame


@dataclass(frozen=True, slots=True)
class _Read:
    """A page that was read.

    Attributes:
        after: it has what came after the event of this number.
        is_full: there may be more after it.
        fired: the numbers of its topics when it began (`Signals.fired`): what happened later is not in it.
        began: when that was, by the monotonic clock.
    """

    after: int
    is_full: bool
    fired: tuple[int, ...]
    began: float
    found: list[PageEvent]

    def since(self, after: int, fired: tuple[int, ...], listening_since: float) -> list[PageEvent] | None:
        """What it has after this event, or None: a read that begins now may find more.

        Who gets nothing waits to be woken by what comes next. So nothing may have happened since it began, or
        they have listened for as long and are woken by it.
        """
        if after < self.after:
            return None
        found = [each for each in self.found if each.item["seq"] > after]
        if found and time.monotonic() - self.began < _FRESH_S:
            return found
        nothing_since = self.fired == fired and 0 not in fired
        was_heard = self.began >= listening_since
        return found if (nothing_since or was_heard) and (found or not self.is_full) else None


class EventPages:
    """For the event loop's thread only."""

    def __init__(self) -> None:
        self._reads: dict[_Asked, _Read] = {}
        self._turns = ProjectTurns(at_once=1)

    async def page(
        self, database: Database, access: Access, after: int, limit: int, listening_since: float | None = None
    ) -> list[PageEvent]:
        """As `events.page`; those who get nothing may wait for the topics if they subscribed to them before.

        Args:
            listening_since: when they subscribed, by the monotonic clock, if this is not the first page of a
                request: then it may be what another one has read.

        Raises:
            Gone: as `events.page`.
            TooManyRequests: as `ProjectTurns.taken`.
        """
        async with self._turns.taken(access.caller):
            asked = (access.projects, limit)
            fired = database.signals.fired(*events.topics(access.projects))
            shared = self._shared(asked, after, fired, listening_since)
            if shared is not None:
                return shared
            began = time.monotonic()
            found = await run_in_threadpool(_page, database, asked, after)
            read = self._reads[asked] = _Read(after, len(found) == limit, fired, began, found)
            asyncio.get_running_loop().call_later(_KEPT_S, self._forget, asked, read)
            return found

    def _shared(
        self, asked: _Asked, after: int, fired: tuple[int, ...], listening_since: float | None
    ) -> list[PageEvent] | None:
        read = self._reads.get(asked)
        if read is None or listening_since is None:
            return None
        return read.since(after, fired, listening_since)

    def _forget(self, asked: _Asked, read: _Read) -> None:
        if self._reads.get(asked) is read:
            del self._reads[asked]


def _page(database: Database, asked: _Asked, after: int) -> list[PageEvent]:
    projects, limit = asked
    with database.read() as session:
        found = events.page(session, after=after, limit=limit, projects=projects)
        return [PageEvent(show(Event, row)) for row in found]
