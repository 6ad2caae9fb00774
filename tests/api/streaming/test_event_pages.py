"""Pages that many followers share have what a page of one's own would have."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mooring.api.streaming.event_pages import EventPages
from mooring.control import events
from mooring.control.events import EventKind
from mooring.core.access import Access, Caller, Permission
from tests.service import Client, RunningService

MADE = 7


class Followers:
    """Those of one project, who have read a page before."""

    def __init__(self, service: RunningService, project: str) -> None:
        self._database, self._project = service.plane.database, project
        caller = Caller("key_1", "key", "follows", permissions={project: frozenset({Permission.READ})})
        self._access = Access(caller, Permission.READ)
        self.pages = EventPages()

    def happens(self) -> None:
        with self._database.write() as session:
            events.append(session, EventKind.INSTANCE_STATE_CHANGED, {}, project_id=self._project)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While others wait for events, as they do between two pages."""
        with self._database.signals.subscribed(*events.topics(self._access.projects)):
            yield

    async def read(self, after: int, limit: int, listening_since: float | None = None) -> list[int]:
        """The numbers of a page, for one who has just subscribed unless told otherwise."""
        since = time.monotonic() if listening_since is None else listening_since
        page = await self.pages.page(self._database, self._access, after, limit, since)
        return [int(each.item["seq"]) for each in page]


@pytest.fixture
def followers(service: RunningService, client: Client) -> Followers:
    project = client.post("/v1/projects", json={"name": "follows-pages"}).json()["id"]
    return Followers(service, str(project))


def test_nobody_misses_an_event_however_far_they_have_read(followers: Followers) -> None:
    async def check() -> None:
        for _ in range(MADE):
            followers.happens()
        with followers.waiting():
            made = (await followers.read(0, 200))[-MADE:]
            for limit in (200, 3, 1):
                for after in (*made, made[0] - 1, made[-1], made[2]):
                    rest = [seq for seq in made if seq > after][:limit]
                    page = await followers.read(after, limit)
                    # A part is as good: they come back for more. Nothing is only for who has read all.
                    assert page == rest[: len(page)]
                    assert page or not rest

    asyncio.run(check())


def test_who_has_read_all_gets_what_happened_after_the_page_was_read(followers: Followers) -> None:
    async def check() -> None:
        followers.happens()
        with followers.waiting():
            last = (await followers.read(0, 200))[-1]
            assert await followers.read(last, 200) == []
            followers.happens()
            (new,) = await followers.read(last, 200)
            assert new > last
            assert await followers.read(new, 200) == []

    asyncio.run(check())


def test_who_was_woken_by_what_came_later_need_not_read_again(followers: Followers) -> None:
    """What happened since they subscribed wakes them at once, and then they get it."""

    async def check() -> None:
        followers.happens()
        with followers.waiting():
            since = time.monotonic()
            last = (await followers.read(0, 200))[-1]
            followers.happens()
            assert await followers.read(last, 200, listening_since=since) == []
            assert await followers.read(last, 200) != []

    asyncio.run(check())
