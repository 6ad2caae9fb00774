"""Shared pages of events have the same events as a separate read."""

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

pytestmark = pytest.mark.both_databases

EVENTS = 7


class Followers:
    """Followers of one project's events."""

    def __init__(self, service: RunningService, project: str) -> None:
        self._database, self._project = service.plane.database, project
        caller = Caller("key_1", "key", "follows", permissions={project: frozenset({Permission.READ})})
        self._access = Access(caller, Permission.READ)
        self.pages = EventPages()

    def append_event(self) -> None:
        with self._database.write() as session:
            events.append(session, EventKind.INSTANCE_STATE_CHANGED, {}, project_id=self._project)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block, another follower waits for events."""
        with self._database.signals.subscribed(*events.topics(self._access.projects)):
            yield

    async def read(self, after: int, limit: int, subscribed_at: float | None = None) -> list[int]:
        """The sequence numbers of a page; `subscribed_at` is when the follower subscribed."""
        since = time.monotonic() if subscribed_at is None else subscribed_at
        page = await self.pages.page(self._database, self._access, after, limit, since)
        return [int(each.item["seq"]) for each in page.found]


@pytest.fixture
def followers(service: RunningService, client: Client) -> Followers:
    project = client.post("/v1/projects", json={"name": "follows-pages"}).json()["id"]
    return Followers(service, str(project))


def test_a_page_has_the_next_events_of_any_position(followers: Followers) -> None:
    async def check() -> None:
        for _ in range(EVENTS):
            followers.append_event()
        with followers.waiting():
            made = (await followers.read(0, 200))[-EVENTS:]
            for limit in (200, 3, 1):
                for after in (*made, made[0] - 1, made[-1], made[2]):
                    rest = [seq for seq in made if seq > after][:limit]
                    page = await followers.read(after, limit)
                    # A partial page is allowed; an empty page only at the end of the log.
                    assert page == rest[: len(page)]
                    assert page or not rest

    asyncio.run(check())


def test_a_follower_at_the_end_gets_events_after_the_cached_page(followers: Followers) -> None:
    async def check() -> None:
        followers.append_event()
        with followers.waiting():
            last = (await followers.read(0, 200))[-1]
            assert await followers.read(last, 200) == []
            followers.append_event()
            (new,) = await followers.read(last, 200)
            assert new > last
            assert await followers.read(new, 200) == []

    asyncio.run(check())


def test_a_page_cached_after_the_subscription_is_used(followers: Followers) -> None:
    """An event since the subscription wakes the follower, which then reads it."""

    async def check() -> None:
        followers.append_event()
        with followers.waiting():
            since = time.monotonic()
            last = (await followers.read(0, 200))[-1]
            followers.append_event()
            assert await followers.read(last, 200, subscribed_at=since) == []
            assert await followers.read(last, 200) != []

    asyncio.run(check())
