"""PostgreSQL's LISTEN: commits of other replicas wake the waiters of this one.

The same connection shows whether PostgreSQL answers at all, which no waiting statement can tell, and has the
lock of the replica that leads.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import psycopg

from mooring.db import leading, serving
from mooring.db.file_notifications import FileListener
from mooring.db.operator_errors import DatabaseProblem
from mooring.db.postgresql import BoundedConnection, connection_parameters, libpq_parameters
from mooring.db.serving import History
from mooring.db.session import NOTIFY_CHANNEL, Database
from mooring.db.signals import ObjectTopic

log = logging.getLogger(__name__)
_RETRY_S: Final = 0.5
_POLL_S: Final = 0.5
_PROBE_TIMEOUT_S: Final = 2.5


def listeners(database: Database, on_other_history: Callable[[DatabaseProblem], None]) -> list["AnyListener"]:
    """What receives the notifications of other processes: one listener; none for a database in memory.

    Args:
        on_other_history: called in the thread of a listener: the process must start again.
    """
    if not database.is_sqlite:
        return [Listener(database, on_other_history)]
    if database.file_notifications is None:
        return []
    return [FileListener(database.file_notifications, database.signals)]


class Listener:
    """A thread with its own connection. Losing the connection costs only time, because waiters also poll.

    Args:
        on_other_history: called with the reason once the database must not be used by this process any more.
    """

    def __init__(self, database: Database, on_other_history: Callable[[DatabaseProblem], None]) -> None:
        self._database = database
        self._on_other_history = on_other_history
        self._history: History | None = None
        self._stop = threading.Event()
        self._asked_at = time.monotonic()  # the begin of the last probe or connection attempt
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)

    def start(self) -> None:
        self._database.leads = False
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                self._database.leads = False
                self._failed(error)
                self._stop.wait(_RETRY_S)
            except DatabaseProblem as problem:
                self._on_other_history(problem)
                return

    def _failed(self, error: psycopg.Error) -> None:
        """PostgreSQL is down if no call was answered since the begin of the last probe.

        An error with a code, such as that of a server with too many connections, is an answer.
        """
        availability = self._database.availability
        is_lost = error.sqlstate is None and availability.answered_at <= self._asked_at
        if is_lost and not availability.is_down:
            availability.is_down = True
            log.warning("PostgreSQL does not answer: requests get 503 until it does: %s", error)

    def _listen(self) -> None:
        self._asked_at = time.monotonic()
        parameters = libpq_parameters(self._database.url) | connection_parameters()
        with BoundedConnection.connect(autocommit=True, **parameters) as connection:
            connection.call_timeout_s = _PROBE_TIMEOUT_S
            self._history = serving.begin(connection, self._history)
            connection.execute(f"LISTEN {NOTIFY_CHANNEL}")
            self._database.leads = leading.take(connection)
            self._answered()
            self._database.signals.fire_all()  # notifications sent before LISTEN are lost
            while not self._stop.is_set():
                # Without `stop_after` a notification would be delivered only when the timeout ends.
                notices = connection.notifies(timeout=_POLL_S, stop_after=1)
                topics = {ObjectTopic(notice.payload) for notice in notices}
                self._database.signals.fire(topics)
                if time.monotonic() >= self._asked_at + _POLL_S:
                    self._asked_at = time.monotonic()
                    self._probe(connection)
                    self._answered()

    def _probe(self, connection: BoundedConnection) -> None:
        """Ask something, such as whether the replica that led has ended."""
        if self._database.leads:
            connection.execute("SELECT 1")
        else:
            self._database.leads = leading.take(connection)

    def _answered(self) -> None:
        availability = self._database.availability
        availability.answered_at = time.monotonic()
        if availability.is_down:
            availability.is_down = False
            log.info("PostgreSQL answers again")


AnyListener = Listener | FileListener
