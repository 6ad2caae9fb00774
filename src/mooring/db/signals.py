"""In-process notifications. They only shorten waits: waiters also poll, so a lost one costs only time."""

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NewType

Wake = Callable[[], None]
ObjectTopic = NewType("ObjectTopic", str)  # made by the methods of `Topic`, or received from PostgreSQL


class Topic(StrEnum):
    """What a waiter subscribes to: one of these, or one object's topic, which the methods below make."""

    QUEUE = "queue"  # an instance was queued
    SCHEDULE = "schedule"  # pending instances may now fit
    GROUPS = "groups"  # a member of an instance group changed
    GPU_HEALTH = "gpu_health"  # reserved GPUs may need a replacement
    EVENTS = "events"  # any event, of any project or machine
    WEBHOOKS = "webhooks"  # a delivery is to be sent that no event has caused

    @staticmethod
    def project_events(project_id: str) -> ObjectTopic:
        return ObjectTopic(f"events:{project_id}")

    @staticmethod
    def node(node_id: str) -> ObjectTopic:
        """The node's desired state changed."""
        return ObjectTopic(f"node:{node_id}")

    @staticmethod
    def node_streams(node_id: str) -> ObjectTopic:
        """A user asked the node for a stream."""
        return ObjectTopic(f"streams:{node_id}")

    @staticmethod
    def instance(instance_id: str) -> ObjectTopic:
        """The instance's state or waiting reason changed."""
        return ObjectTopic(f"instance:{instance_id}")


AnyTopic = Topic | ObjectTopic


class Signals:
    """Wakes the waiters of this process. Subscribe first, then read, then wait: no change is missed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[AnyTopic, set[Wake]] = defaultdict(set)
        self._numbers = itertools.count(1)
        self._fired: dict[AnyTopic, int] = {}  # of topics with a waiter: the number of the last notification
        self.closing = False

    def fire(self, topics: Iterable[AnyTopic]) -> None:
        with self._lock:
            waited_for = [topic for topic in topics if topic in self._wakes]
            self._fired.update(zip(waited_for, self._numbers, strict=False))
            wakes = {wake for topic in waited_for for wake in self._wakes[topic]}
        for wake in wakes:
            wake()

    def fire_all(self) -> None:
        """Wake every waiter, because notifications may have been lost."""
        with self._lock:
            topics = list(self._wakes)
        self.fire(topics)

    def fired(self, *topics: AnyTopic) -> tuple[int, ...]:
        """For each topic a number that changes whenever the topic fires and never repeats; 0: no waiter."""
        with self._lock:
            return tuple(self._fired.get(topic, 0) for topic in topics)

    def close(self) -> None:
        """Wake every waiter for shutdown; `closing` tells them not to wait again."""
        self.closing = True
        self.fire_all()

    @contextmanager
    def subscribed(self, *topics: AnyTopic) -> Iterator["Waiter"]:
        """For `async` code: a waiter that any of the topics wakes."""
        waiter = Waiter()
        with self._subscribed(waiter.wake, topics):
            yield waiter

    @contextmanager
    def waking(self, event: threading.Event, *topics: AnyTopic) -> Iterator[None]:
        """For threads: sets the event when any of the topics fires."""
        with self._subscribed(event.set, topics):
            yield

    @contextmanager
    def _subscribed(self, wake: Wake, topics: tuple[AnyTopic, ...]) -> Iterator[None]:
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
                    self._unsubscribe(topic, wake)

    def _unsubscribe(self, topic: AnyTopic, wake: Wake) -> None:
        self._wakes[topic].discard(wake)
        if not self._wakes[topic]:
            del self._wakes[topic]
            del self._fired[topic]


class Waiter:
    """Lets one coroutine wait; `wake` may be called from any thread.

    Thousands of nodes wait. So a wait takes one future and one timer; those of asyncio take more objects,
    which the garbage collector visits, and end by exceptions.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = False  # as soon as a thread has called `wake`
        self._is_set = False  # as soon as the loop knows
        self._waiting: asyncio.Future[None] | None = None

    def wake(self) -> None:
        # Each call_soon_threadsafe is a system call, so repeated wakes before the next wait are merged.
        # At shutdown the loop may be closed while another thread still commits.
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._set)

    async def wait(self, timeout_s: float) -> bool:
        """Return whether `wake` was called before the timeout, and reset the waiter."""
        if not self._is_set:
            self._waiting = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._release)
            try:
                await self._waiting
            finally:
                timer.cancel()
        if not self._is_set:
            return False
        # In this order: a wake between the two is not lost, since the loop calls `_set` after the reset.
        self._woken = False
        self._is_set = False
        return True

    def _set(self) -> None:
        self._is_set = True
        self._release()

    def _release(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
