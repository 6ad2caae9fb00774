"""No call to PostgreSQL waits without end, and a lost LISTEN connection is replaced."""

import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.abc import PQGen
from psycopg.waiting import Wait
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from mooring.db.notifications import Listener
from mooring.db.postgresql import BoundedConnection
from mooring.db.session import Database, notify
from mooring.db.signals import Signals, Topic
from tests.testbed import processes
from tests.testbed.fixtures import NewPostgresCluster
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until


@pytest.fixture
def cluster(new_postgres_cluster: NewPostgresCluster) -> PostgresCluster:
    return new_postgres_cluster(durable=False)


@pytest.fixture
def database(cluster: PostgresCluster) -> Iterator[Database]:
    made = Database(cluster.url(), Signals())
    yield made
    made.dispose()


@contextmanager
def listening(database: Database) -> Iterator[None]:
    listener = Listener(database, lambda problem: pytest.fail(str(problem)))
    listener.start()
    try:
        wait_until(lambda: _listeners(database))
        yield
    finally:
        listener.stop()


def _query(database: Database, statement: str) -> list[int]:
    with database.read() as session:
        return list(session.scalars(text(statement)))


def _listeners(database: Database) -> list[int]:
    """The pids of the server's processes for connections that listen."""
    listen = "query LIKE 'LISTEN%' OR query = 'SELECT 1' OR query LIKE '%mooring.leading%'"
    others = f"SELECT pid FROM pg_stat_activity WHERE ({listen}) AND pid <> pg_backend_pid()"
    return _query(database, f"{others} ORDER BY backend_start")


def test_a_call_that_waits_when_the_server_freezes_fails(
    cluster: PostgresCluster, database: Database
) -> None:
    with listening(database):
        began = threading.Event()
        failures: list[Exception] = []

        def call() -> None:
            try:
                with database.read() as session:
                    session.execute(text("SELECT 1"))
                    began.set()
                    session.execute(text("SELECT pg_sleep(3600)"))
            except OperationalError as error:
                failures.append(error)

        waiting = threading.Thread(target=call)
        waiting.start()
        assert began.wait(10)
        cluster.freeze()
        try:
            waiting.join(60)
            with pytest.raises(OperationalError):
                _query(database, "SELECT 1")
        finally:
            cluster.thaw()
        assert len(failures) == 1
        wait_until(lambda: not database.availability.is_down, 20)
        assert _query(database, "SELECT 1") == [1]


def test_a_connection_lost_during_a_large_query_leaves_nothing_open(database: Database) -> None:
    """The warning of an open cursor would fail any later test, in which the cursor is collected."""
    large = text("SELECT generate_series(1, 1000)").execution_options(yield_per=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lost_before_close in (False, True):
            with pytest.raises(OperationalError), database.read() as session:
                pid = session.scalar(text("SELECT pg_backend_pid()"))
                result = session.execute(large) if lost_before_close else None
                assert _query(database, f"SELECT pg_terminate_backend({pid}, 10000)::int") == [1]
                if result is not None:
                    result.close()  # SQLAlchemy hides that it fails
                session.execute(large)
            del session, result
        gc.collect()
    assert caught == []


@pytest.mark.parametrize("lost", [False, True], ids=["no answer", "lost before the wait"])
def test_a_call_that_fails_leaves_no_open_generator(
    cluster: PostgresCluster, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """The generator of a pipeline sends something at its end, even if the connection was lost."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: ignored.append(error.exc_value))

    def exit_of_a_pipeline() -> PQGen[None]:
        try:
            while True:
                if lost:
                    connection.pgconn.finish()
                yield Wait.R
        finally:
            raise psycopg.OperationalError("no connection to the server")

    with BoundedConnection.connect(cluster.url()) as connection:
        connection.call_timeout_s = 0.1
        reason = "the connection is (lost|closed)" if lost else "did not answer in time"
        with pytest.raises(psycopg.OperationalError, match=reason):
            connection.wait(exit_of_a_pipeline())
    gc.collect()
    assert ignored == []


def test_a_lost_listening_connection_is_replaced_without_an_outage(database: Database) -> None:
    """Its process on the server is frozen, as if a partition had dropped this connection only."""
    with listening(database):
        (lost,) = _listeners(database)
        processes.freeze(lost)
        try:

            def is_replaced() -> bool:
                assert not database.availability.is_down
                return _listeners(database)[-1] != lost

            wait_until(is_replaced, 30)
        finally:
            processes.thaw(lost)
        woken = threading.Event()
        with database.signals.waking(woken, Topic.QUEUE):
            other = Database(str(database.url.render_as_string(hide_password=False)), Signals())
            with other.write() as session:
                notify(session, Topic.QUEUE)
            other.dispose()
            assert woken.wait(20)


def test_a_call_that_asks_the_server_nothing_counts_as_no_answer(database: Database) -> None:
    """Otherwise each new request, which sets its isolation level, would hide an outage for a while."""
    with database.engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        before = database.availability.answered_at
        driver.set_isolation_level(IsolationLevel.SERIALIZABLE)
        driver.rollback()
        assert database.availability.answered_at == before
        driver.execute("SELECT 1")
        assert database.availability.answered_at > before


def test_a_restart_of_the_server_breaks_no_later_transaction(
    cluster: PostgresCluster, database: Database
) -> None:
    """The server ends the pooled connections, and nothing was asked on them since."""
    for _ in range(2):
        with database.read() as first, database.read() as second:
            assert first.scalar(text("SELECT 1")) == second.scalar(text("SELECT 1"))
        cluster.stop()
        cluster.start()
        with database.read() as first, database.write() as second:
            assert first.scalar(text("SELECT 1")) == second.scalar(text("SELECT 1"))
