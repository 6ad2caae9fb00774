"""Transactions: atomic, one writer at a time on SQLite, and notifications after the commit only."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from functools import partial

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from mooring.control import bootstrap
from mooring.control.tenants import projects
from mooring.db import session as sessions
from mooring.db.notifications import Listener
from mooring.db.session import Database, Ending, at_end, normalized, notify
from mooring.db.signals import Signals, Topic
from mooring.db.tables import ApiKey, Project
from mooring.db.types import new_id, now
from tests.concurrency import run_concurrently

pytestmark = pytest.mark.both_databases


def only(kind: str) -> pytest.MarkDecorator:
    """Run the test on one kind of database only."""
    return pytest.mark.parametrize("database_url", [kind], indirect=True)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(database_url, Signals())
    yield made
    made.dispose()


def _project(name: str) -> Project:
    return projects.new(name, {})


def _names(database: Database) -> list[str]:
    with database.read() as session:
        return sorted(session.scalars(select(Project.name)))


def test_a_failed_write_is_rolled_back_without_notification(database: Database) -> None:
    woken = threading.Event()
    with database.signals.waking(woken, Topic.QUEUE):
        with pytest.raises(RuntimeError, match="no"), database.write() as session:
            session.add(_project("a"))
            session.flush()
            notify(session, Topic.QUEUE)
            raise RuntimeError("no")
        assert (_names(database), woken.is_set()) == ([], False)
        with database.write() as session:
            session.add(_project("a"))
            notify(session, Topic.QUEUE)
            assert not woken.is_set()
        assert (_names(database), woken.is_set()) == (["a"], True)


def test_a_read_transaction_never_commits(database: Database) -> None:
    with database.read() as session:
        session.add(_project("a"))
        session.flush()
    assert _names(database) == []


def test_ending_steps_run_in_order_before_the_commit(database: Database) -> None:
    order: list[str] = []

    def note(step: Ending, _session: object) -> None:
        order.append(step.name)

    with database.write() as session:
        for step in sorted(Ending, reverse=True):
            at_end(session, step, partial(note, step))
        session.add(_project("a"))
        order.append("body")
    assert order == ["body", "WITHOUT_LOCKS", "EVENTS", "COUNTS"]

    def refuse(_session: object) -> None:
        raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late"), database.write() as session:
        at_end(session, Ending.COUNTS, refuse)
        session.add(_project("b"))
    assert _names(database) == ["a"]


def test_concurrent_writers_lose_no_update(database: Database) -> None:
    with database.write() as session:
        session.add(_project("counter-0"))

    def count(_number: int) -> None:
        for _ in range(5):
            with database.write() as session:
                row = session.scalars(select(Project).with_for_update()).one()
                row.name = f"counter-{int(row.name.split('-')[1]) + 1}"

    run_concurrently(8, count)
    assert _names(database) == ["counter-40"]


def test_a_reader_sees_one_snapshot_and_does_not_block_writers(database: Database) -> None:
    with database.read() as session:
        assert session.scalars(select(Project)).all() == []
        with database.write() as other:
            other.add(_project("a"))
        assert session.scalars(select(Project)).all() == []
    assert _names(database) == ["a"]


@only("sqlite")  # PostgreSQL has many writers
def test_a_writer_that_times_out_raises_an_operational_error(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_WRITE_LOCK_TIMEOUT_S", 0.05)
    with database.write(), pytest.raises(OperationalError), database.write():
        pass
    with database.write() as session:
        session.add(_project("a"))


@only("sqlite")  # PostgreSQL ends a transaction whose commit fails
def test_a_failed_commit_leaves_no_open_transaction(database: Database) -> None:
    with database.engine.begin() as connection:
        reference = "REFERENCES projects (id) DEFERRABLE INITIALLY DEFERRED"
        connection.execute(text(f"CREATE TABLE child (id TEXT {reference})"))
    for _ in range(3):
        with pytest.raises(IntegrityError), database.write() as session:
            session.execute(text("INSERT INTO child VALUES ('nobody')"))
        # An open transaction would block the writers of all processes.
        other = Database(database.url.render_as_string(hide_password=False), Signals())
        with other.write() as session:
            session.add(_project(new_id("x")))
        other.dispose()


def test_database_errors_contain_no_parameter_values(database: Database) -> None:
    """Errors are logged, and parameters include users' env and command output."""
    with pytest.raises(DBAPIError) as raised, database.write() as session:
        session.execute(text("SELECT * FROM nowhere WHERE a = :value"), {"value": "canary"})
    assert "nowhere" in str(raised.value)
    assert "canary" not in str(raised.value)


def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(
            ApiKey(
                id="k", name="k", prefix="", project_id="nobody", scopes=[], secret_hash="x",
                created_at=now(),
            )
        )  # fmt: skip


def test_times_are_read_as_they_were_written(database: Database) -> None:
    time_sent = datetime(2026, 11, 21, 8, 0, 0, 123_000, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    with database.write() as session:
        row = _project("a")
        row.created_at = time_sent
        session.add(row)
    with database.read() as session:
        (read,) = session.scalars(select(Project.created_at))
    assert read == time_sent
    assert read.tzinfo is UTC


def test_now_is_in_whole_milliseconds() -> None:
    assert now().microsecond % 1000 == 0


def test_replicas_that_start_together_create_one_identity(database: Database) -> None:
    def begin(_number: int) -> tuple[str, str | None]:
        with database.write() as session:
            identity, key = bootstrap.ensure(session, None)
        return identity.control_plane_id, key

    made = run_concurrently(8, begin)
    assert len({identity for identity, _key in made}) == 1
    assert sum(key is not None for _identity, key in made) == 1
    with database.read() as session:
        assert len(session.scalars(select(ApiKey)).all()) == 1


def test_each_configured_admin_key_is_installed_once(database: Database) -> None:
    for key in ("a" * 32, "a" * 32, "b" * 32):
        with database.write() as session:
            assert bootstrap.ensure(session, key)[1] is None
    with database.read() as session:
        assert len(session.scalars(select(ApiKey)).all()) == 2


@pytest.mark.parametrize(
    ("given", "driver"),
    [("postgresql://u:p@h/d", "postgresql+psycopg"), ("postgres://u:p@h/d", "postgresql+psycopg"),
     ("postgresql+psycopg://h/d", "postgresql+psycopg"), ("sqlite:///x", "sqlite")],
)  # fmt: skip
def test_plain_urls_get_the_shipped_driver(given: str, driver: str) -> None:
    assert normalized(given).drivername == driver


@only("postgresql")  # SQLite has one process
def test_a_commit_wakes_waiters_of_another_replica(database_url: str) -> None:
    here, there = Database(database_url, Signals()), Database(database_url, Signals())
    listener = Listener(there, lambda problem: pytest.fail(str(problem)))
    listener.start()
    woken = threading.Event()
    try:
        with there.signals.waking(woken, Topic.QUEUE):
            for _ in range(100):
                with here.write() as session:
                    notify(session, Topic.QUEUE)
                if woken.wait(0.1):
                    break
            assert woken.is_set()
            # Waiters are woken immediately, not at the listener's next poll.
            began = time.monotonic()
            for _ in range(8):
                woken.clear()
                with here.write() as session:
                    notify(session, Topic.QUEUE)
                assert woken.wait(5)
            assert time.monotonic() - began < 1.5
    finally:
        listener.stop()
        here.dispose()
        there.dispose()
