"""The event loop of all streams of a process."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

Work = Callable[[], Coroutine[Any, Any, None]]

# Threads for the short calls that block: the signals to processes, and sockets in other network namespaces.
CALL_THREADS: Final = 8

log = logging.getLogger(__name__)


class StreamLoop:
    """An event loop in a thread, which starts with the first work. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of `_loop`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # used by the loop's thread only

    def begin(self, work: Work) -> Callable[[], None]:
        """Start the coroutine of `work`. Returns a function that cancels it."""
        loop = self._started()
        started: list[asyncio.Task[None]] = []

        def start() -> None:
            task = loop.create_task(work())
            started.append(task)
            # The loop itself keeps only weak references to its tasks.
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        loop.call_soon_threadsafe(start)

        def cancel() -> None:
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in started])

        return cancel

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(CALL_THREADS, "stream-call"))
                threading.Thread(target=self._loop.run_forever, name="streams", daemon=True).start()
            return self._loop

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("a stream failed", exc_info=failure)
