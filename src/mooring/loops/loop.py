"""`Loop`: a thread that runs `tick` periodically and when a topic is notified, and survives failed ticks."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from mooring.core.backoff import Backoff
from mooring.db.session import Database
from mooring.db.signals import AnyTopic

Item = TypeVar("Item")

log = logging.getLogger(__name__)


class Loop(ABC):
    """Calls `tick` when one of the topics is notified, and at least every `interval_s` seconds."""

    topics: tuple[AnyTopic, ...] = ()
    interval_s: float = 5.0
    # After a tick that used more than 20 ms of CPU time the loop sleeps for this many times that time, up to
    # `max_rest_s`: even with many notifications it must leave the interpreter to other threads. Time that a
    # tick waited, such as for a frozen database, must not lead to a rest.
    rest_factor: float = 2.0
    max_rest_s: float = 5.0

    def __init__(self, database: Database) -> None:
        self.database = database
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    @abstractmethod
    def tick(self) -> None:
        """Do the work once. Exceptions are logged, and the tick is retried later."""

    def each(self, items: Iterable[Item], act: Callable[[Session, Item], object]) -> None:
        """Call `act` for each item in a transaction of its own; a failure does not stop the other items.

        Raises:
            ExceptionGroup: `act` failed for some items.
            OperationalError: the database is unreachable or too busy, so the other items would fail too.
        """
        failures: list[Exception] = []
        for item in items:
            try:
                with self.database.write() as session:
                    act(session, item)
            except OperationalError:
                raise
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise ExceptionGroup(f"{len(failures)} failed", failures)

    def rest(self, rest_s: float) -> None:
        """Let other threads work for this time, at most `max_rest_s`. Returns at once when the loop stops."""
        self._stopping.wait(min(rest_s, self.max_rest_s))

    def rest_after(self, cpu_s: float) -> float:
        """For how long to rest after a tick, in seconds."""
        return cpu_s * self.rest_factor if cpu_s > 0.02 else 0

    def wake(self) -> None:
        self._woken.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        backoff = Backoff(1.0, 5.0)
        with self.database.signals.waking(self._woken, *self.topics):
            while not self._stopping.is_set():
                self._woken.clear()
                began = time.thread_time()
                if self._ticked():
                    backoff.reset()
                    self._wait_for_next_tick(time.thread_time() - began)
                else:
                    self._stopping.wait(backoff.pause_s())

    def _ticked(self) -> bool:
        try:
            self.tick()
        except Exception:
            log.exception("%s failed; retrying", type(self).__name__)
            return False
        return True

    def _wait_for_next_tick(self, cpu_s: float) -> None:
        self.rest(self.rest_after(cpu_s))
        self._woken.wait(self.interval_s)
