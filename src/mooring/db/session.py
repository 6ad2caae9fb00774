"""The database: short transactions, opened by the outer layers only, and notifications after the commit.

SQLite: WAL, `synchronous=FULL`, one writer at a time behind an in-process lock and `BEGIN IMMEDIATE`.
PostgreSQL: row locks. After a commit, other processes are notified too: with `NOTIFY`, or on SQLite through
sockets beside the file.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import IntEnum
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from mooring.db import failures, postgresql
from mooring.db.file_lock import FileLock, file_of
from mooring.db.file_notifications import FileNotifications
from mooring.db.signals import AnyTopic, Signals

log = logging.getLogger(__name__)

NOTIFY_CHANNEL = "mooring"
_TOPICS = "mooring.topics"
_AT_END = "mooring.at_end"
_WRITE_LOCK_TIMEOUT_S = 10.0


def normalized(url: str) -> URL:
    """The URL; `postgresql://` and `postgres://` get the driver that Mooring ships.

    They may name several hosts, as for libpq.
    """
    parsed = postgresql.url_of_several_hosts(url) or make_url(url)
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
    EVENTS = 2  # late, because readers see no later event before this one is committed
    COUNTS = 3  # updates a row of `project_storage`, as other writers in the project do


def at_end(session: Session, step: Ending, write: Callable[[Session], None]) -> None:
    """Call `write` at the end of the transaction, after every other row is locked and flushed."""
    session.info.setdefault(_AT_END, []).append((step, write))


class Database:
    """An engine and the two ways into it: `read()` and `write()`.

    Attributes:
        is_damaged: whether a statement found damaged data since the start.
        written_at: the monotonic time of the last commit with an event.
        full_at: the monotonic time when a statement was last rejected because the disk is full.
        leads: whether this process does at once what one replica is enough for (`db/leading.py`).
        file_notifications: to other processes with the same SQLite file; None: PostgreSQL, or no file.

    Raises:
        DatabaseProblem: the SQLite file is being restored, or a restore of it was interrupted.
    """

    def __init__(self, url: str, signals: Signals, *, pool_size: int = 20) -> None:
        self.url = normalized(url)
        self.signals = signals
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.availability = postgresql.Availability()
        self.is_damaged = False
        self.written_at = self.full_at = -math.inf
        self.leads = True
        path = file_of(self.url)
        self._in_use = None if path is None else FileLock(path)
        self.file_notifications = None if path is None else FileNotifications(path)
        self.engine = (
            _sqlite_engine(self.url)
            if self.is_sqlite
            else postgresql.new_engine(self.url, pool_size, self.availability)
        )
        event.listen(self.engine, "handle_error", self._note_error)
        # One snapshot per reader, as on SQLite: an instance and its GPU allocations are consistent.
        snapshots = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._readers = self.engine if self.is_sqlite else snapshots
        self._autocommit = self.engine.execution_options(isolation_level="AUTOCOMMIT")
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
    def write(self, *, commit: bool = True) -> Iterator[Session]:
        """A session that commits at the end of the block, or rolls back if the block raises.

        Args:
            commit: False: roll back in the end, after everything that could fail; nobody is notified.

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
            steps = sorted(session.info.pop(_AT_END, ()), key=itemgetter(0))
            for _step, write in steps:
                write(session)
            if not commit:
                session.rollback()
                return
            session.commit()
            if any(step is Ending.EVENTS for step, _write in steps):
                self.written_at = time.monotonic()
            topics: set[AnyTopic] = session.info.pop(_TOPICS, set())
        self.signals.fire(topics)
        if topics:
            self._notify_processes(topics)

    def require_writable(self) -> None:
        """Commit a small change: a database that is full, read-only or a standby still answers reads.

        Raises:
            SQLAlchemyError: the write failed.
        """
        with self.write() as session:
            # SQLite would not write an unchanged row.
            session.execute(text("UPDATE control_plane SET write_checks = write_checks + 1"))

    def _notify_processes(self, topics: Collection[AnyTopic]) -> None:
        if self.file_notifications is not None:
            self.file_notifications.send(topics)
        elif not self.is_sqlite:
            self._notify_replicas(topics)

    def _notify_replicas(self, topics: Collection[AnyTopic]) -> None:
        """Send `NOTIFY`, which takes a lock of the whole database until its commit: not in the transaction.

        A notification that is lost costs only time, since all waiters also poll.
        """
        try:
            with self._autocommit.connect() as connection:
                parameters = {"channel": NOTIFY_CHANNEL, "topics": sorted(map(str, topics))}
                connection.execute(_NOTIFY, parameters)
        except SQLAlchemyError as error:
            log.warning("cannot notify other replicas: %s", error)

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

    def _note_error(self, context: ExceptionContext) -> None:
        error = context.original_exception
        if failures.is_damage(error) and not self.is_damaged:
            self.is_damaged = True
            log.critical("the database is damaged, restore a backup (docs/operating.md): %s", error)
        if failures.is_full(error):
            self.full_at = time.monotonic()
        if getattr(error, "sqlstate", None) == failures.READ_ONLY:
            # A primary that became a standby: the next connection may reach the new primary.
            context.is_disconnect = True

    def dispose(self) -> None:
        self.engine.dispose()
        if self._in_use is not None:
            self._in_use.release()


# Without waiting for the disk: only the delivery matters.
_NOTIFY = text(
    """
    SELECT set_config('synchronous_commit', 'off', true), pg_notify(:channel, topic)
    FROM unnest(CAST(:topics AS text[])) AS topic
    """
)


def _sqlite_engine(url: URL) -> Engine:
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
