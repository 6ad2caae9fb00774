"""A virtual machine room: threads, clocks and random numbers that follow one seed.

`install` replaces the primitives of `threading`, `time`, `queue`, `os` and `random`. The product then runs as
it is, with all its threads, in one real thread: each virtual thread is a greenlet, and runs until it blocks.
Time stands still while anything can run. So a run depends on its seed only, and a minute takes a second.

Import this module and call `install` before anything that uses these primitives.
"""

import concurrent.futures.thread  # noqa: F401 - registers its real lock for forks
import heapq
import itertools
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from greenlet import getcurrent, greenlet

# When a run begins, in Unix time: 2026-06-01. The monotonic clock begins at an hour of uptime.
EPOCH: Final = 1_780_272_000.0
_UPTIME_S: Final = 3600.0


class Killed(BaseException):
    """Ends the threads of a killed process. Nothing of the product catches it."""


class Machine:
    """A machine with a wall clock of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock_error_s = 0.0


class Process:
    """A process of the product. `kill` is SIGKILL.

    Attributes:
        steps_left: it is killed when it has made so many steps more; None: it lives on.
        frozen_until: it does nothing before this time, as after SIGSTOP.
        on_end: called when it has ended, with the exception of a thread that died, or None.
    """

    def __init__(self, hub: "Hub", name: str, machine: Machine) -> None:
        self.name, self.machine = name, machine
        self.is_alive = True
        self.steps_left: int | None = None
        self.frozen_until = 0.0
        self.on_end: Callable[[BaseException | None], None] = lambda _failure: None
        self._hub = hub
        self.tasks: list[Task] = []

    def spawn(self, target: Callable[[], object], name: str) -> "Task":
        return self._hub.spawn(self, target, name)

    def kill(self, failure: BaseException | None = None) -> None:
        """Takes effect before any other thread runs."""
        if self.is_alive:
            self.is_alive = False
            self._hub.ending.append((self, failure))


class Task:
    """A virtual thread."""

    def __init__(self, hub: "Hub", process: Process, target: Callable[[], object], name: str) -> None:
        self.process, self.name, self.number = process, name, next(hub.numbers)
        self.has_ended = False
        self.is_woken = False
        self.timer: int | None = None  # the number of the timer that it waits for
        self.joiners: list[Task] = []
        self._hub, self._target = hub, target
        self.greenlet = greenlet(self._run, hub.main)

    def _run(self) -> None:
        try:
            self._target()
        except Killed:
            pass
        except BaseException as failure:  # a thread that dies ends its process, as in the product
            self.process.kill(failure)
        finally:
            self.has_ended = True
            for joiner in self.joiners:
                self._hub.wake(joiner)


class Hub:
    """Runs the tasks, one at a time, in an order that the seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bytes = random.Random(seed + 1)  # apart, so that longer keys do not change the order of tasks
        self.now = 0.0
        self.main = getcurrent()
        self.current: Task | None = None
        self.numbers = itertools.count(1)
        self.ending: list[tuple[Process, BaseException | None]] = []
        self.switches = 0
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task]] = []
        self._is_over = False

    def spawn(self, process: Process, target: Callable[[], object], name: str) -> Task:
        if not process.is_alive:
            raise Killed
        task = Task(self, process, target, name)
        process.tasks.append(task)
        self._ready.append(task)
        return task

    def wake(self, task: Task) -> None:
        if not task.is_woken and not task.has_ended:
            task.is_woken = True
            task.timer = None
            self._ready.append(task)

    def block(self, timeout_s: float | None = None) -> bool:
        """Let others run until this task is woken. Returns False after a timeout."""
        task = self.current
        assert task is not None, "the main thread of a simulation never blocks"
        if not task.process.is_alive:
            raise Killed
        task.is_woken = False
        task.timer = None
        if timeout_s is not None:
            task.timer = next(self.numbers)
            heapq.heappush(self._timers, (self.now + max(0.0, timeout_s), task.timer, task))
        self.main.switch()
        return task.is_woken

    def sleep(self, seconds: float) -> None:
        while self.block(seconds):
            pass

    def step(self, longest_s: float = 0.0) -> None:
        """A point at which a process may be killed, and may be delayed by its machine."""
        task = self.current
        if task is None:
            return
        process = task.process
        if not process.is_alive:
            raise Killed
        if process.steps_left is not None:
            process.steps_left -= 1
            if process.steps_left <= 0:
                process.kill()
                raise Killed
        if longest_s and self.random.random() < 0.1:
            self.sleep(self.random.random() * longest_s)

    def run(self, until: float, observe: Callable[[], None]) -> None:
        """Run until this time. `observe` is called after each step of time."""
        while True:
            self._end_processes()
            if self._ready:
                # Sorted: the order of waking may be that of a set of objects, which differs from run to run.
                self._ready.sort(key=attrgetter("number"))
                self._resume(self._ready.pop(self.random.randrange(len(self._ready))))
                continue
            observe()
            while self._timers and self._timers[0][2].timer != self._timers[0][1]:
                heapq.heappop(self._timers)
            if not self._timers or self._timers[0][0] > until:
                self.now = until
                return
            self.now, _number, task = heapq.heappop(self._timers)
            task.timer = None
            self._ready.append(task)

    def close(self, processes: Iterable[Process]) -> None:
        """End all processes of the run."""
        for process in processes:
            process.kill()
        self._end_processes()

    def _resume(self, task: Task) -> None:
        if task.has_ended:
            return
        if task.process.frozen_until > self.now:
            task.timer = next(self.numbers)
            heapq.heappush(self._timers, (task.process.frozen_until, task.timer, task))
            return
        self.switches += 1
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None

    def _end_processes(self) -> None:
        while self.ending:
            process, failure = self.ending.pop(0)
            for task in process.tasks:
                if not task.has_ended:
                    self.current = task
                    if task.greenlet:
                        task.greenlet.throw(Killed)
                    else:
                        task.has_ended = True  # it had not begun
                    self.current = None
            process.tasks = []
            process.on_end(failure)


_hub: Hub | None = None


def use(hub: Hub | None) -> None:
    """Make this hub's time and threads those of `threading` and `time`."""
    global _hub  # noqa: PLW0603 - the primitives have no other way to find it
    _hub = hub
    if hub is not None:
        random.seed(hub.random.random())


def hub() -> Hub:
    assert _hub is not None, "no simulation runs"
    return _hub


# --- time


def _monotonic() -> float:
    return _UPTIME_S + (_hub.now if _hub else 0.0)


def _wall() -> float:
    error_s = _hub.current.process.machine.clock_error_s if _hub and _hub.current else 0.0
    return EPOCH + error_s + (_hub.now if _hub else 0.0)


def _sleep(seconds: float) -> None:
    hub().sleep(seconds)


def _random_bytes(size: int) -> bytes:
    return _hub.bytes.randbytes(size) if _hub else bytes(size)


# --- threads


class Lock:
    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until = None if timeout < 0 else hub().now + timeout
        while self._is_locked:
            left_s = None if until is None else until - hub().now
            if not blocking or (left_s is not None and left_s <= 0):
                return False
            task = hub().current
            assert task is not None
            self._waiting.append(task)
            try:
                hub().block(left_s)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        if self._waiting:
            hub().wake(self._waiting.popleft())

    def release_all(self) -> int:
        self.release()
        return 1

    def acquire_all(self, _depth: int) -> None:
        self.acquire()

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _me()
        if self._owner is not me or not self._depth:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._is_locked:
                super().release()

    def release_all(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def acquire_all(self, depth: int) -> None:
        task = _hub.current if _hub else None
        if task is not None and not task.process.is_alive:
            # A killed process leaves its `with` blocks. Others may use this lock: it belongs to an engine.
            self._depth += 1
            raise Killed
        self.acquire()
        self._depth = depth


def _me() -> object:
    return _hub.current if _hub and _hub.current else "main"


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiting: deque[Task] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = hub().current
        assert task is not None
        self._waiting.append(task)
        depth = self._lock.release_all()
        try:
            return hub().block(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            self._lock.acquire_all(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else hub().now + timeout
        while not (found := predicate()):
            left_s = None if until is None else until - hub().now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            hub().wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            hub().wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_set:
            return True
        task = hub().current
        assert task is not None
        self._waiting.append(task)
        try:
            hub().block(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
        return self._is_set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name or "thread", daemon
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self._task: Task | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        task = hub().current
        assert task is not None
        self._task = task.process.spawn(self.run, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended

    def join(self, timeout: float | None = None) -> None:
        task = hub().current
        if self._task is not None and not self._task.has_ended and task is not None:
            self._task.joiners.append(task)
            hub().block(timeout)


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition()

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self) -> Any:
        with self._changed:
            while not self._items:
                self._changed.wait()
            return self._items.popleft()


def install() -> None:
    """Replace the primitives, for the rest of this process."""
    for name, value in {
        "Lock": Lock, "RLock": RLock, "Condition": Condition, "Event": Event, "Thread": Thread,
    }.items():  # fmt: skip
        setattr(threading, name, value)
    queue.SimpleQueue = SimpleQueue  # type: ignore[misc,assignment]
    for name, function in {
        "monotonic": _monotonic, "time": _wall, "sleep": _sleep, "thread_time": lambda: 0.0,
        "clock_gettime": lambda _clock: _monotonic(), "time_ns": lambda: int(_wall() * 1e9),
    }.items():  # fmt: skip
        setattr(time, name, function)
    os.urandom = _random_bytes
    random._urandom = _random_bytes  # type: ignore[attr-defined]  # the source of `secrets`
