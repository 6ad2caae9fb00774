"""Nudges: they only shorten a wait. Whoever is woken looks at rows, and all works without them, later.

Topics: `queue`, `schedule`, `events` (of all projects and machines), `events:<project id>`, `node:<id>`,
`streams:<node id>`, `instance:<id>`, `stream:<id>`.
"""

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Wake = Callable[[], None]


class Signals:
    """Wakes the waiters of this process. Subscribe first, then read, then wait: no change is missed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[str, set[Wake]] = defaultdict(set)
        self._numbers = itertools.count(1)
        self._fired: dict[str, int] = {}  # the number of the last time, of topics that somebody waits for
        self.closing = False

    def fire(self, topics: Iterable[str]) -> None:
        with self._lock:
            waited_for = [topic for topic in topics if topic in self._wakes]
            self._fired.update(zip(waited_for, self._numbers, strict=False))
            wakes = {wake for topic in waited_for for wake in self._wakes[topic]}
        for wake in wakes:
            wake()

    def fire_all(self) -> None:
        """Something may have been missed: everybody looks."""
        with self._lock:
            topics = list(self._wakes)
        self.fire(topics)

    def fired(self, *topics: str) -> tuple[int, ...]:
        """A number of each topic that is another after each time that it fires, and never again the same.

        Of topics that nobody waits for, 0.
        """
        with self._lock:
            return tuple(self._fired.get(topic, 0) for topic in topics)

    def close(self) -> None:
        """The process is about to end: wake everybody, and let nobody wait again."""
        self.closing = True
        self.fire_all()

    @contextmanager
    def subscribed(self, *topics: str) -> Iterator["Waiter"]:
        """For `async` code: a waiter that any of the topics wakes."""
        waiter = Waiter()
        with self._listening(waiter.wake, topics):
            yield waiter

    @contextmanager
    def waking(self, event: threading.Event, *topics: str) -> Iterator[None]:
        """For threads: sets the event when any of the topics fires."""
        with self._listening(event.set, topics):
            yield

    @contextmanager
    def _listening(self, wake: Wake, topics: tuple[str, ...]) -> Iterator[None]:
        with self._lock:
            for topic in topics:
                if topic not in self._wakes:
                    self._fired[topic] = next(self._numbers)
                self._wakes[topic].add(wake)
        try:
            yield
        finally:
            with self._lock:
                for topic in topics:
                    self._forget(topic, wake)

    def _forget(self, topic: str, wake: Wake) -> None:
        self._wakes[topic].discard(wake)
        if not self._wakes[topic]:
            del self._wakes[topic]
            del self._fired[topic]


class Waiter:
    """One coroutine's ear; `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._woken = False  # the event is set, or about to be

    def wake(self) -> None:
        # Each call of the loop from another thread is a system call; much may happen before this one waits.
        # A server that is shutting down has closed the loop under a thread that still commits.
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> bool:
        """Whether it was woken before the time was up; then it listens anew."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return False
        # In this order: a wake between the two is not lost, since the loop sets the event after the clear.
        self._woken = False
        self._event.clear()
        return True
