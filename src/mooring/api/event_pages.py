"""Pages of events, read once for all that ask for the same page.

An event wakes every stream and long poll of its project, and most of them have read the same events before.
Their turns come one after the other, so that a thousand of them keep no other request waiting.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from mooring.api import views
from mooring.control import events
from mooring.db.session import Database
from mooring.schemas.base import Json

# All that one event has woken have had their turn by then.
_KEPT_S = 1.0

_Asked = tuple[frozenset[str] | None, int, int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A page that was read.

    Attributes:
        fired: the numbers of its topics when it began (`Signals.fired`): what happened later is not in it.
    """

    fired: tuple[int, ...]
    items: list[Json]


class EventPages:
    """For the event loop's thread only."""

    def __init__(self) -> None:
        self._reads: dict[_Asked, _Read] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def page(
        self, database: Database, turns_of: str, projects: frozenset[str] | None, after: int, limit: int
    ) -> list[Json]:
        """As `events.page`. Callers that will wait have subscribed to `events.topics(projects)` before.

        Args:
            turns_of: whose requests take turns: a project, or somebody with no single project.

        Raises:
            Gone: as `events.page`.
        """
        async with self._turn(turns_of):
            asked = (projects, after, limit)
            fired = database.signals.fired(*events.topics(projects))
            read = self._reads.get(asked)
            if read is None or read.fired != fired or 0 in fired:
                read = _Read(fired, await run_in_threadpool(_page, database, asked))
                self._reads[asked] = read
                asyncio.get_running_loop().call_later(_KEPT_S, self._forget, asked, read)
            return read.items

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        turns = self._turns.setdefault(key, asyncio.Lock())
        self._waiting[key] += 1
        try:
            async with turns:
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._turns[key]

    def _forget(self, asked: _Asked, read: _Read) -> None:
        if self._reads.get(asked) is read:
            del self._reads[asked]


def _page(database: Database, asked: _Asked) -> list[Json]:
    projects, after, limit = asked
    with database.read() as session:
        found = events.page(session, after=after, limit=limit, projects=projects)
        return [views.event(row) for row in found]
