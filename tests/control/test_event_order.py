"""Events that several transactions append at the same time on PostgreSQL."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, event, select, text
from sqlalchemy.orm import Session

from mooring.api.streaming.waiting import POLL_INTERVAL_S
from mooring.control import bootstrap, event_order, events
from mooring.control.events import EventKind, Page
from mooring.db import migrate
from mooring.db.session import Database, Ending, at_end
from mooring.db.signals import Signals
from mooring.db.tables import Event
from tests.concurrency import run_concurrently
from tests.service import Client, RunningService

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    migrate.upgrade(database_url)
    made = Database(database_url, Signals())
    with made.write() as session:
        bootstrap.ensure(session, "k" * 32)
    yield made
    made.dispose()


def append(session: Session, name: str, project_id: str | None = None) -> None:
    events.append(session, EventKind.NODE_STATE_CHANGED, {"name": name}, project_id=project_id)


def page(database: Database, after: int, limit: int = 200) -> Page:
    with database.read() as session:
        complete_to = event_order.complete_to(session)
    with database.read() as session:
        return events.page(session, after=after, limit=limit, complete_to=complete_to)


def newest_complete_seq(database: Database) -> int:
    with database.read() as session:
        complete_to = event_order.complete_to(session)
    with database.read() as session:
        return events.newest_complete_seq(session, complete_to)


def names(found: Page) -> list[str]:
    return [row.data["name"] for row in found.events]


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_an_event_is_held_back_until_those_before_it_are_committed(
    database: Database, is_rolled_back: bool
) -> None:
    with database.write() as session:
        append(session, "before")
    meanwhile: list[Page] = []
    newest: list[int] = []

    def commit_another(_session: Session) -> None:
        with database.write() as second:
            second.execute(text("SET LOCAL lock_timeout = '1s'"))
            append(second, "second")
        meanwhile.append(page(database, 0))
        newest.append(newest_complete_seq(database))
        if is_rolled_back:
            raise RuntimeError("rolled back")

    try:
        with database.write() as first:
            append(first, "first")
            at_end(first, Ending.COUNTS, commit_another)
    except RuntimeError:
        assert is_rolled_back
    assert (names(meanwhile[0]), meanwhile[0].held_back) == (["before"], True)
    assert newest == [meanwhile[0].events[-1].seq]  # a reader that starts here will get those after it
    later = page(database, 0)
    expected = ["before", "second"] if is_rolled_back else ["before", "first", "second"]
    assert (names(later), later.held_back) == (expected, False)


def test_followers_miss_no_event_of_concurrent_writers(database: Database) -> None:
    writers, each = 8, 40
    written = [(count, part) for count in range(each) for part in range(1 + count % 3)]
    done = threading.Event()

    def write(number: int) -> None:
        for count in range(each):
            with database.write() as session:
                for part in range(1 + count % 3):
                    append(session, f"{number}-{count}-{part}")

    def follow(_number: int) -> list[tuple[int, str]]:
        read: list[tuple[int, str]] = []
        while True:
            is_last = done.is_set()
            found = page(database, read[-1][0] if read else 0, limit=7).events
            read += [(row.seq, row.data["name"]) for row in found]
            if is_last and not found:
                return read

    with ThreadPoolExecutor(2) as pool:
        followers = [pool.submit(follow, number) for number in range(2)]
        try:
            run_concurrently(writers, write)
        finally:
            done.set()
        first, second = (follower.result() for follower in followers)
    expected = {f"{number}-{count}-{part}" for number in range(writers) for count, part in written}
    assert first == second == sorted(first)
    assert {name for _seq, name in first} == expected
    assert len(first) == len(expected)


def test_a_held_back_event_needs_no_notification(service: RunningService, client: Client) -> None:
    """The writer before it notifies followers of another project only, or nobody if it is rolled back."""
    project = client.post("/v1/projects", json={"name": "follows"}).json()["id"]
    key = client.post(
        "/v1/api-keys", json={"name": "follower", "project_id": project, "role": "viewer"}
    ).json()
    database = service.plane.database
    last = client.get("/v1/events", params={"limit": 200}).json()["last_seq"]
    found: list[str] = []
    has_looked = threading.Event()

    def follow() -> None:
        with Client(service.url, key["key"]) as follower:
            items = follower.items("/v1/events", after=last, wait_s=60)
        found.extend(item["data"]["name"] for item in items)

    def note(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        if "pg_locks" in statement:
            has_looked.set()

    thread = threading.Thread(target=follow)

    def commit_another(_session: Session) -> None:
        with database.write() as second:
            append(second, "held back", project)
        event.listen(database.engine, "after_cursor_execute", note)
        thread.start()
        assert has_looked.wait(20)
        raise RuntimeError("rolled back")

    with pytest.raises(RuntimeError, match="rolled back"), database.write() as first:
        append(first, "rolled back")
        at_end(first, Ending.COUNTS, commit_another)
    event.remove(database.engine, "after_cursor_execute", note)
    thread.join(POLL_INTERVAL_S - 2)
    assert found == ["held back"]
    thread.join(60)


def test_the_last_event_before_a_time_is_found(database: Database) -> None:
    first = datetime(2026, 1, 1, tzinfo=UTC)
    with database.write() as session:
        for minute in range(20):
            row = {"id": f"evt_{minute}", "type": "t", "at": first + timedelta(minutes=minute), "data": {}}
            session.add(Event(**row))
            session.flush()
        session.execute(delete(Event).where(Event.id.in_(["evt_7", "evt_8", "evt_19"])))
    with database.read() as session:
        seqs = {row.seq: row.at for row in session.execute(select(Event.seq, Event.at))}
        for minute in range(-1, 21):
            at = first + timedelta(minutes=minute, seconds=30)
            expected = max((seq for seq, found in seqs.items() if found < at), default=0)
            assert events.seq_before(session, at) == expected, minute
