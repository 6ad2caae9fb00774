"""PostgreSQL's LISTEN: commits of other replicas wake the waiters of this one."""

import logging
import threading

import psycopg

from mooring.db.session import NOTIFY_CHANNEL, Database
from mooring.db.signals import ObjectTopic

log = logging.getLogger(__name__)
_RETRY_S = 1.0
_POLL_S = 0.5


class Listener:
    """A thread with its own connection. Losing the connection costs only time, because waiters also poll."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                log.warning("cannot receive PostgreSQL notifications; reconnecting: %s", error)
                self._stop.wait(_RETRY_S)

    def _listen(self) -> None:
        url = self._database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True, connect_timeout=3) as connection:
            connection.execute(f"LISTEN {NOTIFY_CHANNEL}")
            self._database.signals.fire_all()  # notifications sent before LISTEN are lost
            while not self._stop.is_set():
                # Without `stop_after` a notification would be delivered only when the timeout ends.
                notices = connection.notifies(timeout=_POLL_S, stop_after=1)
                topics = {ObjectTopic(notice.payload) for notice in notices}
                self._database.signals.fire(topics)
