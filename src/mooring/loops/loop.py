"""A loop: a thread that looks at rows, is woken early by notifications, and outlives every failed look."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from mooring.db.session import Database
from mooring.db.signals import AnyTopic

Item = TypeVar("Item")

log = logging.getLogger(__name__)
_LONGEST_BACKOFF_S = 5.0


class Loop(ABC):
    """`tick` is called when a topic fires, and after `interval_s` in any case."""

    topics: tuple[AnyTopic, ...] = ()
    interval_s: float = 5.0
    # A flood of notifications must not make a loop take the whole interpreter: after a tick it rests in
    # proportion to what the tick took.
    rest_factor: float = 2.0

    def __init__(self, database: Database) -> None:
        self.database = database
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    @abstractmethod
    def tick(self) -> None:
        """One look. Whatever it raises is logged, and it is tried again later."""

    def each(self, items: Iterable[Item], act: Callable[[Session, Item], object]) -> None:
        """Do it for each in a transaction of its own; one that fails keeps no other from its turn.

        Raises:
            ExceptionGroup: some have failed.
            OperationalError: the database is away, or too busy: the rest would fail as well.
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

    def wake(self) -> None:
        self._woken.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        failures = 0
        with self.database.signals.waking(self._woken, *self.topics):
            while not self._stopping.is_set():
                self._woken.clear()
                began = time.monotonic()
                failures = 0 if self._ticked() else failures + 1
                self._rest(time.monotonic() - began, failures)

    def _ticked(self) -> bool:
        try:
            self.tick()
        except Exception:
            log.exception("%s failed; it is tried again", type(self).__name__)
            return False
        return True

    def _rest(self, took_s: float, failures: int) -> None:
        if failures:
            self._stopping.wait(min(2.0 ** (failures - 1), _LONGEST_BACKOFF_S))
            return
        self._stopping.wait(took_s * self.rest_factor if took_s > 0.02 else 0)
        self._woken.wait(self.interval_s)
