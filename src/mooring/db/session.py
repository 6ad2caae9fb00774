"""The database: short transactions, opened by the outer layers only, and notifications after the commit.

SQLite: WAL, `synchronous=FULL`, one writer at a time behind an in-process lock and `BEGIN IMMEDIATE`.
PostgreSQL: row locks, and `NOTIFY` in the transaction so that other replicas are notified too.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from mooring.db import postgresql
from mooring.db.signals import AnyTopic, Signals

NOTIFY_CHANNEL = "mooring"
_TOPICS = "mooring.topics"
_AT_END = "mooring.at_end"
_WRITE_LOCK_TIMEOUT_S = 10.0


def normalized(url: str) -> URL:
    """The URL; `postgresql://` and `postgres://` get the driver that Mooring ships."""
    parsed = make_url(url)
    if parsed.drivername in {"postgres", "postgresql"}:
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def notify(session: Session, *topics: AnyTopic) -> None:
    """Wake the topics' waiters once this transaction has committed."""
    session.info.setdefault(_TOPICS, set()).update(topics)


class Ending(IntEnum):
    """The last steps of a transaction, in order. Locks that many writers take are taken last.

    Each further statement under such a lock delays the next writer by a round trip.
    """

    WITHOUT_LOCKS = 1
    NOTIFY = 2  # PostgreSQL delivers it after the commit
    EVENTS = 3  # under the event log's lock, which all writers of events take
    COUNTS = 4  # updates the project's row of `project_storage`, as most writers in the project do


def at_end(session: Session, step: Ending, write: Callable[[Session], None]) -> None:
    """Call `write` at the end of the transaction, after every other row is locked and flushed."""
    session.info.setdefault(_AT_END, []).append((step, write))


class Database:
    """An engine and the two ways into it: `read()` and `write()`."""

    def __init__(self, url: str, signals: Signals, *, pool_size: int = 20) -> None:
        self.url = normalized(url)
        self.signals = signals
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.availability = postgresql.Availability()
        self.engine = (
            _sqlite_engine(self.url)
            if self.is_sqlite
            else postgresql.new_engine(self.url, pool_size, self.availability)
        )
        # One snapshot per reader, as on SQLite: an instance and its GPU allocations are consistent.
        snapshots = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._readers = self.engine if self.is_sqlite else snapshots
        self._writer = threading.Lock()
        # Copied to the `info` of every session: the service's keys and rules that writers apply.
        self.session_info: dict[str, Any] = {}

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session on one snapshot. It is always rolled back at the end."""
        with Session(
            self._readers, autoflush=False, expire_on_commit=False, info=self.session_info
        ) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits at the end of the block, or rolls back if the block raises.

        Raises:
            OperationalError: cannot get the write lock in time, or cannot reach the database.
        """
        with (
            self.only_writer(),
            Session(self.engine, expire_on_commit=False, info=self.session_info) as session,
        ):
            if self.is_sqlite:
                session.connection(execution_options={"mooring_immediate": True})
            yield session
            session.flush()
            topics: set[AnyTopic] = session.info.pop(_TOPICS, set())
            if topics and not self.is_sqlite:
                at_end(session, Ending.NOTIFY, lambda ending: _send(ending, topics))
            for _step, write in sorted(session.info.pop(_AT_END, ()), key=itemgetter(0)):
                write(session)
            assert _TOPICS not in session.info, "notify() in an at_end step does not reach other replicas"
            session.commit()
        self.signals.fire(topics)

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """On SQLite, hold the write lock of this process.

        Raises:
            OperationalError: cannot get the lock in time.
        """
        # SQLite's own busy wait polls and can starve a writer; an in-process lock wakes the next one at once.
        if not self.is_sqlite:
            yield
            return
        if not self._writer.acquire(timeout=_WRITE_LOCK_TIMEOUT_S):
            raise OperationalError("BEGIN IMMEDIATE", None, TimeoutError("cannot get the write lock"))
        try:
            yield
        finally:
            self._writer.release()

    def dispose(self) -> None:
        self.engine.dispose()


def _send(session: Session, topics: set[AnyTopic]) -> None:
    session.execute(
        text("SELECT pg_notify(:channel, topic) FROM unnest(CAST(:topics AS text[])) AS topic"),
        {"channel": NOTIFY_CHANNEL, "topics": sorted(map(str, topics))},
    )


def _sqlite_engine(url: URL) -> Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(
        url, connect_args={"timeout": 10}, pool_size=40, max_overflow=20, hide_parameters=True
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    event.listen(engine, "checkin", _end_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the begin hook below decides how transactions start
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "busy_timeout=10000",
        "journal_size_limit=4194304",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that starts as a reader fails with "database is locked" when it upgrades, whatever the
    # timeout, so writers begin with BEGIN IMMEDIATE.
    immediate = connection.get_execution_options().get("mooring_immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _end_sqlite(connection: Any, _record: Any) -> None:
    # A COMMIT that fails (disk full, for example) leaves its transaction open, and SQLAlchemy 2.1 returns the
    # connection to the pool as it is. The transaction's lock would then block every other writer for good.
    if connection is not None and connection.in_transaction:
        connection.rollback()
