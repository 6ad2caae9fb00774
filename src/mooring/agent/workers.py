"""Daemon threads for blocking calls, started when they are needed."""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Workers:
    """Does what it is given, at most `limit` things at a time, the rest in order.

    Unlike an executor's, its threads do not keep the process alive: a pull that hangs must not delay the
    agent's end.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unclaimed = 0  # threads without a task, less the tasks that wait for them

    def submit(self, task: Callable[[], None]) -> None:
        with self._lock:
            self._unclaimed -= 1
            one_more = self._unclaimed < 0 and self._threads < self._limit
            if one_more:
                self._threads += 1
                self._unclaimed += 1
        self._tasks.put(task)
        if one_more:
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except Exception:
                log.exception("a task of %s failed", self._name)
            with self._lock:
                self._unclaimed += 1
