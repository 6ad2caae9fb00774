"""Whether the database can serve requests, found out by a real write."""

import logging
import math
import threading
import time
from concurrent.futures import Future
from typing import Final

from mooring.db import migrate
from mooring.db.session import Database
from mooring_client.errors import DatabaseUnavailable, NotMigrated, Unavailable

log = logging.getLogger(__name__)

# After a successful write, none is made to check for this long.
KEPT_S: Final = 1.0
# The database is not ready for this long after its full disk rejected a write. The small write of a check
# proves little then: PostgreSQL updates a row within its page, and rejects only what needs a new page.
FULL_S: Final = 5.0


class WriteProbe:
    """Checks the schema and writes a row, in a thread of its own: a write may hang as long as the database.

    There is at most one check at a time, and it writes at most once in KEPT_S, not while requests write.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._newest: Future[Unavailable | None] | None = None
        self._written_at = -math.inf  # the last success, monotonic
        self._last_error = ""

    def check(self) -> Future[Unavailable | None]:
        """The check in progress, or one that begins now.

        Its result is why the database cannot serve requests; None: it can.
        """
        with self._lock:
            newest = self._newest
            if newest is None or newest.done():
                self._newest = newest = Future()
                newest.set_running_or_notify_cancel()
                threading.Thread(target=self._run, args=(newest,), name="write-probe", daemon=True).start()
            return newest

    def _run(self, outcome: Future[Unavailable | None]) -> None:
        problem: Unavailable | None = None
        try:
            self._require_ready()
        except Unavailable as error:
            problem = error
        except Exception as error:
            self._log(str(error))
            problem = DatabaseUnavailable(
                "the database does not accept writes; the server's log has the cause"
            )
        else:
            self._log("")
        outcome.set_result(problem)

    def _require_ready(self) -> None:
        database = self._database
        if database.is_damaged:
            raise DatabaseUnavailable("the database is damaged; restore a backup")
        at, wanted = migrate.current(database.engine), migrate.newest()
        if at != wanted:
            raise NotMigrated(f"the database is at revision {at}, not {wanted}; run: mooring db upgrade")
        if time.monotonic() < database.full_at + FULL_S:
            raise DatabaseUnavailable("the database's disk is full: free space there")
        if time.monotonic() >= max(self._written_at, database.written_at) + KEPT_S:
            database.require_writable()
            self._written_at = time.monotonic()

    def _log(self, error: str) -> None:
        """Log each new error once, and the first success after it."""
        if error and error != self._last_error:
            log.warning("not ready, because the database does not accept writes: %s", error)
        elif self._last_error and not error:
            log.info("the database accepts writes again")
        self._last_error = error
