"""Queues of requests for resources that all projects share. A request that waits holds no thread.

SchedulerTurns: one request at a time in this process runs the scheduler, round-robin over projects. The
scheduler keeps the interpreter busy: two at a time would be no faster, and slow down all other requests.
ProjectTurns: a few requests of each project, or of each admin, at a time, for example writes: SQLite has one
writer, and on PostgreSQL a waiting write has a connection.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from mooring.core.access import Caller
from mooring_client.errors import TooManyQuestions, TooManyRequests

# About as many such requests as a key can send in a minute.
MAX_WAITING_PER_PROJECT: Final = 64
MAX_WAIT_S: Final = 30.0
# After a turn, its project pauses for this multiple of the turn's length, so that it uses the interpreter,
# which all requests share, for at most a third of the time.
PAUSE_FACTOR: Final = 2.0

# Concurrent writes of one project: while one commits, the next is prepared.
MAX_CONCURRENT_WRITES: Final = 2
# Of one admin, who writes in many projects.
MAX_CONCURRENT_WRITES_OF_ADMIN: Final = 8

Clock = Callable[[], float]


class ProjectTurns:
    """Limits each project to a number of concurrent turns; others wait in order. Event loop's thread only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._requests: Counter[str] = Counter()

    def __len__(self) -> int:
        """The number of requests that have a turn or wait for one."""
        return self._requests.total()

    @asynccontextmanager
    async def taken(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn of the caller's project; it lasts as long as the block.

        Raises:
            TooManyRequests: no turn was free within MAX_WAIT_S.
        """
        key = caller.project_id or caller.id
        turns = self._turns.setdefault(key, asyncio.Semaphore(self._limit))
        self._requests[key] += 1
        try:
            await self._acquire(turns)
            try:
                yield
            finally:
                turns.release()
        finally:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key], self._turns[key]

    async def _acquire(self, turns: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await turns.acquire()
        except TimeoutError:
            raise TooManyRequests(
                "too many of your concurrent requests wait; try again soon", retry_after_s=1
            ) from None


class SchedulerTurns:
    """The request that runs the scheduler now, and those that wait. Event loop's thread only."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._busy = False
        # By project; the project whose last turn is longest ago is first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._paused_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def taken(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn; it lasts as long as the block.

        Raises:
            TooManyQuestions: too many requests of the project wait, or no turn was free within MAX_WAIT_S.
        """
        key = caller.project_id or caller.id
        await self._turn(key)
        began = self._clock()
        try:
            yield
        finally:
            self._pause(key, began)
            self._end()

    async def _turn(self, key: str) -> None:
        waiting = self._waiting.setdefault(key, deque())
        if len(waiting) >= MAX_WAITING_PER_PROJECT:
            raise _too_many()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._start_next()
        has_turn = False
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await turn
            has_turn = True
        except TimeoutError:
            raise _too_many() from None
        finally:
            if not has_turn:
                self._cancel(key, turn)

    def _cancel(self, key: str, turn: asyncio.Future[None]) -> None:
        """Stop waiting after a timeout or a disconnect, which may coincide with the start of the turn."""
        if turn.done() and not turn.cancelled():
            self._end()
            return
        waiting = self._waiting.get(key, deque())
        if turn not in waiting:
            return  # `_start_next` has removed it already
        waiting.remove(turn)
        if not waiting:
            del self._waiting[key]

    def _pause(self, key: str, began: float) -> None:
        now = self._clock()
        self._paused_until = {each: until for each, until in self._paused_until.items() if until > now}
        self._paused_until[key] = now + PAUSE_FACTOR * (now - began)

    def _end(self) -> None:
        self._busy = False
        self._start_next()

    def _start_next(self) -> None:
        """Start the turn of the next project that does not pause."""
        while self._waiting and not self._busy:
            now = self._clock()
            key = next((each for each in self._waiting if self._paused_until.get(each, now) <= now), None)
            if key is None:
                self._start_next_later(min(self._paused_until[each] for each in self._waiting) - now)
                return
            first = self._next_of(key)
            # A cancelled request stays in the queue until its task runs again.
            if not first.done():
                self._busy = True
                first.set_result(None)

    def _next_of(self, key: str) -> asyncio.Future[None]:
        first = self._waiting[key].popleft()
        if self._waiting[key]:
            self._waiting.move_to_end(key)
        else:
            del self._waiting[key]
        return first

    def _start_next_later(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._start_next)


def _too_many() -> TooManyQuestions:
    return TooManyQuestions(
        "too many requests of your project wait for the scheduler (explanations, dry runs, the queue); "
        "try again soon",
        retry_after_s=1,
    )
