"""Calls functions after some time, all in one thread."""

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Timers:
    """Any thread may call `after`. The thread begins with the first timer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock guards everything below
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # so that two functions are never compared
        self._thread: threading.Thread | None = None

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="timers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._next()()

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while True:
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left_s)
