"""Runs the tasks of agents: each in a thread, or those of many simulated nodes in one event loop.

A task is a coroutine function, and the code of a task is the same for both. It waits only with `Signal.wait`,
with `Tasks.call`, and for calls to the control plane (`ControlPlaneClient.awaited`). In a thread these block
and never suspend the coroutine, so `run_blocking` runs it like an ordinary function.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from mooring.agent.sync.workers import Workers

Result = TypeVar("Result")
Task = Callable[[], Coroutine[Any, Any, None]]

CALL_THREADS: Final = 8
LOOKUP_THREADS: Final = 2  # resolve host names

_WAS_SET: Final = True
_TIMEOUT: Final = False


class Signal(Protocol):
    """An event. Any thread may set and clear it; tasks wait for it."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set. Returns False after the timeout."""


class Tasks(Protocol):
    def signal(self) -> Signal: ...

    def start(self, task: Task, name: str) -> Signal:
        """Start a task. Returns a signal that is set at its end. An exception in a task ends a thread."""

    async def call(self, function: Callable[[], Result]) -> Result:
        """Call a function that may wait for the disk, a lock or the engine."""


def run_blocking(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never suspends, because it uses `ThreadTasks`."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    coroutine.close()
    raise RuntimeError("a task in a thread waits for an event loop")


class ThreadTasks:
    """Each task has a thread of its own."""

    def signal(self) -> Signal:
        return _ThreadSignal()

    def start(self, task: Task, name: str) -> Signal:
        ended = self.signal()

        def run() -> None:
            try:
                run_blocking(task())
            finally:
                ended.set()

        threading.Thread(target=run, name=name, daemon=True).start()
        return ended

    async def call(self, function: Callable[[], Result]) -> Result:
        return function()


class _ThreadSignal:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        return self._event.wait(timeout_s)


class LoopTasks:
    """All tasks run in the event loop of one thread, and all functions of `call` in a few more threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS))
        self._workers = Workers("call", CALL_THREADS)
        self._running: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="tasks", daemon=True).start()

    def signal(self) -> Signal:
        return _LoopSignal(self._loop)

    def start(self, task: Task, name: str) -> Signal:
        ended = self.signal()

        async def run() -> None:
            try:
                await task()
            finally:
                ended.set()

        self._loop.call_soon_threadsafe(self._begin, run, name)
        return ended

    async def call(self, function: Callable[[], Result]) -> Result:
        answer: asyncio.Future[Result] = self._loop.create_future()

        def work() -> None:
            try:
                result = function()
            except Exception as error:
                self._loop.call_soon_threadsafe(_fail, answer, error)
            else:
                self._loop.call_soon_threadsafe(_answer, answer, result)

        self._workers.submit(work)
        return await answer

    def _begin(self, run: Task, name: str) -> None:
        # The loop itself keeps only weak references to its tasks.
        task = self._loop.create_task(run(), name=name)
        self._running.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            self._loop.stop()

    def _run(self) -> None:
        self._loop.run_forever()
        if self._failure is not None:
            raise self._failure  # ends this thread, and with it the process


class _LoopSignal:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._is_set = loop, False
        self._waiters: set[asyncio.Future[bool]] = set()  # used by the loop's thread only

    def set(self) -> None:
        self._is_set = True
        self._loop.call_soon_threadsafe(self._wake)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    async def wait(self, timeout_s: float | None = None) -> bool:
        if self._is_set:
            return True
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.add(waiter)
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, _answer, waiter, _TIMEOUT)
        try:
            return await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for waiter in self._waiters:
            _answer(waiter, _WAS_SET)


def _answer(waiter: asyncio.Future[Result], result: Result) -> None:
    if not waiter.done():
        waiter.set_result(result)


def _fail(waiter: asyncio.Future[Any], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
