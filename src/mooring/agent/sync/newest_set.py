"""Applies the newest of the sets that the control plane sends, such as the networks that should exist."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Final, Generic, TypeVar

from mooring.agent.runtime import RuntimeUnavailable
from mooring.agent.sync.workers import Workers

CHECK_S: Final = 15.0  # the same set is applied again after this time: another program may have undone it

Member = TypeVar("Member")

log = logging.getLogger(__name__)


class NewestSet(Generic[Member]):
    """Calls `apply` with the newest set, in one thread at a time, and again if it fails.

    Args:
        noun: of the set, for the log.
    """

    def __init__(self, apply: Callable[[Sequence[Member]], None], workers: Workers, noun: str) -> None:
        self._apply, self._workers, self._noun = apply, workers, noun
        self._lock = Lock()  # of everything below
        self._wanted: Sequence[Member] | None = None
        self._applied: Sequence[Member] | None = None
        self._applied_at = 0.0
        self._busy = False

    def request(self, wanted: Sequence[Member]) -> None:
        with self._lock:
            self._wanted = wanted
        self.apply_when_due()

    def apply_when_due(self) -> None:
        with self._lock:
            wanted, is_recent = self._wanted, time.monotonic() < self._applied_at + CHECK_S
            if self._busy or wanted is None or (is_recent and wanted == self._applied):
                return
            self._busy = True
        self._workers.submit(partial(self._run, wanted))

    def _run(self, newest: Sequence[Member] | None) -> None:
        wanted = None
        while newest is not None and newest != wanted:
            wanted = newest
            succeeded = self._try(wanted)
            with self._lock:
                self._applied, self._applied_at = wanted if succeeded else None, time.monotonic()
                newest = self._wanted
                self._busy = newest != wanted

    def _try(self, wanted: Sequence[Member]) -> bool:
        try:
            self._apply(wanted)
        except Exception as error:
            expected = isinstance(error, RuntimeUnavailable)
            log.warning("cannot apply %s: %s", self._noun, error, exc_info=None if expected else error)
            return False
        return True
