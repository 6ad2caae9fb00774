"""Turns of requests for what all projects share. A request that waits for its turn holds no thread.

Turns: those that ask the scheduler, one at a time in this process, project by project. What the scheduler
computes keeps the interpreter busy, so two at a time would be no faster, and all other requests slower.
ProjectTurns: a few at a time of each project, of those that write for example: SQLite has one writer.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from mooring.core.access import Caller
from mooring.core.errors import TooManyRequests

# What one key may ask in a minute, all at once.
WAITING_OF_PROJECT: Final = 64
LONGEST_WAIT_S: Final = 30.0
# After each turn its project rests for so many times as long, so that one project never has more than a third
# of an interpreter, which all requests share.
REST_FACTOR: Final = 2.0

# Of one project's writes: while one is written, the next is made ready.
WRITES_AT_ONCE: Final = 2

Clock = Callable[[], float]


class ProjectTurns:
    """So many at a time of each project, the others in the order in which they came.

    For the event loop's thread only.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._asking: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many have or wait for a turn."""
        return self._asking.total()

    @asynccontextmanager
    async def taken(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn of the caller's project and hold it for the length of the block.

        Raises:
            TooManyRequests: there was none within LONGEST_WAIT_S.
        """
        key = caller.project_id or caller.id
        turns = self._turns.setdefault(key, asyncio.Semaphore(self._at_once))
        self._asking[key] += 1
        try:
            await self._acquire(turns)
            try:
                yield
            finally:
                turns.release()
        finally:
            self._asking[key] -= 1
            if not self._asking[key]:
                del self._asking[key], self._turns[key]

    async def _acquire(self, turns: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                await turns.acquire()
        except TimeoutError:
            raise TooManyRequests(
                "too many requests of your project go on at the same time; try again soon", retry_after_s=1
            ) from None


class Turns:
    """Who asks the scheduler now, and who waits for it. For the event loop's thread only."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._taken = False
        # By project, the one that had its turn longest ago first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._rests_until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def taken(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn and hold it for the length of the block.

        Raises:
            TooManyRequests: code `too_many_questions`: too many of the same project wait, or this one did for
                too long.
        """
        key = caller.project_id or caller.id
        await self._turn(key)
        began = self._clock()
        try:
            yield
        finally:
            self._rest(key, began)
            self._end()

    async def _turn(self, key: str) -> None:
        waiting = self._waiting.setdefault(key, deque())
        if len(waiting) >= WAITING_OF_PROJECT:
            raise _too_many()
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        self._grant()
        has_it = False
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                await mine
            has_it = True
        except TimeoutError:
            raise _too_many() from None
        finally:
            if not has_it:
                self._give_up(key, mine)

    def _give_up(self, key: str, mine: asyncio.Future[None]) -> None:
        """Its time was up, or its client is gone; it may have been given its turn in the same moment."""
        if mine.done() and not mine.cancelled():
            self._end()
            return
        waiting = self._waiting.get(key, deque())
        if mine not in waiting:
            return  # `_grant` passed it over before it was here
        waiting.remove(mine)
        if not waiting:
            del self._waiting[key]

    def _rest(self, key: str, began: float) -> None:
        now = self._clock()
        self._rests_until = {each: until for each, until in self._rests_until.items() if until > now}
        self._rests_until[key] = now + REST_FACTOR * (now - began)

    def _end(self) -> None:
        self._taken = False
        self._grant()

    def _grant(self) -> None:
        """Give the turn to the first of the next project that does not rest."""
        while self._waiting and not self._taken:
            now = self._clock()
            key = next((each for each in self._waiting if self._rests_until.get(each, now) <= now), None)
            if key is None:
                self._grant_later(min(self._rests_until[each] for each in self._waiting) - now)
                return
            first = self._next_of(key)
            # A request that is cancelled leaves the queue only when its own task runs again.
            if not first.done():
                self._taken = True
                first.set_result(None)

    def _next_of(self, key: str) -> asyncio.Future[None]:
        first = self._waiting[key].popleft()
        if self._waiting[key]:
            self._waiting.move_to_end(key)
        else:
            del self._waiting[key]
        return first

    def _grant_later(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._grant)


def _too_many() -> TooManyRequests:
    return TooManyRequests(
        "too many requests of your project wait for an answer of the scheduler (explanations, dry runs, the "
        "queue); try again soon",
        code="too_many_questions",
        retry_after_s=1,
    )
