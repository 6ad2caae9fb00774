"""Daemon threads for blocking calls, shared fairly among owners (projects).

    submit(task, owner) ──> one queue per owner, bounded ──round robin──> threads

At most `each` tasks of an owner run at a time, so other threads remain for other owners. Of tasks with the
same subject one runs at a time; the others wait without a thread.
"""

import logging
import queue
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

Task = Callable[[], None]

log = logging.getLogger(__name__)


@dataclass(eq=False, frozen=True, slots=True)
class Ticket:
    """A submitted task; `withdraw` removes it while it is queued."""

    task: Task
    owner: str
    subject: str | None


class Workers:
    """A thread pool whose threads do not keep the process alive when a task hangs.

    Args:
        limit: how many tasks run at the same time.
        each: how many of them one owner may have; the default is `limit`.
        waiting: how many queued tasks one owner may have; the default is no limit.
    """

    def __init__(self, name: str, limit: int, *, each: int | None = None, waiting: int | None = None) -> None:
        self._name, self._limit = name, limit
        self._each, self._waiting = each or limit, waiting
        self._lock = threading.Lock()  # of everything below but `_ready`
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the next owner comes first
        self._running: Counter[str] = Counter()  # by owner
        self._subjects: set[str] = set()  # of running tasks
        self._active = self._threads = 0
        self._ready: queue.SimpleQueue[Ticket] = queue.SimpleQueue()  # never more tickets than threads

    @property
    def idle(self) -> bool:
        """Whether no task is running or queued."""
        with self._lock:
            return not self._active and not self._queues

    def has_room(self, owner: str) -> bool:
        """Whether another task of this owner would be accepted."""
        with self._lock:
            return self._has_room(owner)

    def submit(
        self, task: Task, owner: str = "", *, subject: str | None = None, bounded: bool = True
    ) -> Ticket | None:
        """Queue a task; None: the owner's queue is full.

        Args:
            bounded: False for a further step of work that was accepted before.
        """
        with self._lock:
            if bounded and not self._has_room(owner):
                return None
            ticket = Ticket(task, owner, subject)
            self._queues.setdefault(owner, deque()).append(ticket)
            self._dispatch()
            return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """Remove a queued task; False: it is running, or has run."""
        with self._lock:
            queued = self._queues.get(ticket.owner)
            if queued is None or ticket not in queued:
                return False
            queued.remove(ticket)
            if not queued:
                del self._queues[ticket.owner]
            return True

    def _has_room(self, owner: str) -> bool:
        return self._waiting is None or len(self._queues.get(owner, ())) < self._waiting

    def _dispatch(self) -> None:
        """Start the tasks that may run now. Called with the lock held, after each change."""
        while self._active < self._limit and (ticket := self._take_next()) is not None:
            self._active += 1
            self._running[ticket.owner] += 1
            if ticket.subject is not None:
                self._subjects.add(ticket.subject)
            self._ready.put(ticket)
            if self._threads < self._active:
                self._threads += 1
                name = f"{self._name}-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()

    def _take_next(self) -> Ticket | None:
        """The next task, round robin over the owners that are below their limit."""
        for owner, queued in self._queues.items():
            if self._running[owner] >= self._each:
                continue
            ticket = next((one for one in queued if one.subject not in self._subjects), None)
            if ticket is None:
                continue
            queued.remove(ticket)
            if queued:
                self._queues.move_to_end(owner)
            else:
                del self._queues[owner]
            return ticket
        return None

    def _work(self) -> None:
        while True:
            ticket = self._ready.get()
            try:
                ticket.task()
            except Exception:
                log.exception("a task of %s failed", self._name)
            with self._lock:
                self._finished(ticket)
                self._dispatch()

    def _finished(self, ticket: Ticket) -> None:
        self._active -= 1
        self._running[ticket.owner] -= 1
        if not self._running[ticket.owner]:
            del self._running[ticket.owner]
        if ticket.subject is not None:
            self._subjects.discard(ticket.subject)
