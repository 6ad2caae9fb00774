"""Pages of events, read once for all requests for the same events.

An event wakes every stream and long poll of its project, and most of them need the same page. Requests of one
project take turns to read, so that a thousand of them do not delay other requests.
"""

import asyncio
import time
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from mooring.api.http.turns import ProjectTurns
from mooring.api.streaming import sse
from mooring.api.views.show import show
from mooring.control import event_order, events
from mooring.core.access import Access
from mooring.db.session import Database
from mooring_client.schemas.base import Json
from mooring_client.schemas.events import Event

# How long a page is cached: enough for all readers that one event has woken.
_CACHED_S = 1.0
# Under load, a page may lack the events of the last 0.25 s: its readers get them with their next page.
_FRESH_S = 0.25

_PageKey = tuple[frozenset[str] | None, int]  # projects, and the number of events


@dataclass(slots=True)
class PageEvent:
    """An event of a shared page."""

    item: Json
    _frame: bytes | None = None

    @property
    def frame(self) -> bytes:
        """The event as a server-sent event, encoded once for all streams."""
        if self._frame is None:
            self._frame = sse.frame(self.item, self.item["seq"])
        return self._frame


@dataclass(frozen=True, slots=True)
class Events:
    """The next events of a reader.

    Attributes:
        held_back: as `control.events.Page.held_back`: read again soon, without waiting for a notification.
    """

    found: list[PageEvent]
    held_back: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    """A page that was read from the database.

    Attributes:
        after: the page has the events after this sequence number.
        has_more: more events may follow at once.
        fired: `Signals.fired` of its topics when the read began; later events may be missing from the page.
        began: when the read began, by the monotonic clock.
    """

    after: int
    has_more: bool
    fired: tuple[int, ...]
    began: float
    found: list[PageEvent]

    def events_after(self, after: int, fired: tuple[int, ...], subscribed_at: float) -> Events | None:
        """The page's events after this sequence number, or None if the database must be read again.

        A reader without events waits for a notification. An empty result is safe only if no event followed
        the read, or if the reader subscribed before the read and so will be notified.
        """
        if after < self.after:
            return None
        found = [each for each in self.found if each.item["seq"] > after]
        if found and time.monotonic() - self.began < _FRESH_S:
            return Events(found)
        is_current = self.fired == fired and 0 not in fired
        is_subscribed = self.began >= subscribed_at
        is_whole = bool(found) or not self.has_more
        return Events(found) if (is_current or is_subscribed) and is_whole else None


class EventPages:
    """The pages read recently. For the event loop's thread only."""

    def __init__(self) -> None:
        self._cached: dict[_PageKey, _Read] = {}
        self._turns = ProjectTurns(limit=1)

    async def page(
        self, database: Database, access: Access, after: int, limit: int, subscribed_at: float | None = None
    ) -> Events:
        """As `events.page`. A caller that gets no events may wait for the topics if it subscribed before.

        Args:
            subscribed_at: when the caller subscribed, by the monotonic clock; None for the first page of a
                request, which is always read from the database.

        Raises:
            Gone: as `events.page`.
            TooManyRequests: as `ProjectTurns.taken`.
        """
        async with self._turns.taken(access.caller):
            page_key = (access.projects, limit)
            fired = database.signals.fired(*events.topics(access.projects))
            shared = self._shared(page_key, after, fired, subscribed_at)
            if shared is not None:
                return shared
            began = time.monotonic()
            page = await run_in_threadpool(_page, database, page_key, after)
            has_more = page.held_back or len(page.found) == limit
            read = self._cached[page_key] = _Read(after, has_more, fired, began, page.found)
            asyncio.get_running_loop().call_later(_CACHED_S, self._forget, page_key, read)
            return page

    async def newest(self, database: Database, access: Access) -> int:
        """As `events.newest_complete_seq`.

        Raises:
            TooManyRequests: as `ProjectTurns.taken`.
        """
        async with self._turns.taken(access.caller):
            return await run_in_threadpool(_newest, database)

    def _shared(
        self, page_key: _PageKey, after: int, fired: tuple[int, ...], subscribed_at: float | None
    ) -> Events | None:
        read = self._cached.get(page_key)
        if read is None or subscribed_at is None:
            return None
        return read.events_after(after, fired, subscribed_at)

    def _forget(self, page_key: _PageKey, read: _Read) -> None:
        if self._cached.get(page_key) is read:
            del self._cached[page_key]


def _newest(database: Database) -> int:
    with database.read() as session:
        complete_to = event_order.complete_to(session)
    with database.read() as session:
        return events.newest_complete_seq(session, complete_to)


def _page(database: Database, page_key: _PageKey, after: int) -> Events:
    projects, limit = page_key
    with database.read() as session:
        complete_to = event_order.complete_to(session)
    with database.read() as session:
        page = events.page(session, after=after, limit=limit, complete_to=complete_to, projects=projects)
        return Events([PageEvent(show(Event, row)) for row in page.events], page.held_back)
