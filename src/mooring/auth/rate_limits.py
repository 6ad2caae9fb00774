"""Limits on requests per minute, concurrent streams, and failed credentials.

Each replica counts on its own, in memory: N replicas behind a proxy allow N times as much. Decision 2 says
why this is neither the `limits` package nor a GCRA.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address, ip_address
from itertools import repeat
from math import ceil
from threading import Lock
from typing import Final, TypeVar

from mooring.core.access import Caller
from mooring_client.errors import (
    TooManyRequests,
    TooManyStreams,
    TooManyStreamsOnNode,
    Unauthorized,
)

Key = TypeVar("Key")
Clock = Callable[[], float]
Headers = list[tuple[bytes, bytes]]


class ActionClass(StrEnum):
    """Operations that share one rate limit."""

    READ = "read"
    WRITE = "write"
    EXEC = "exec"
    STREAM = "stream"  # may stay open for hours: logs, events and waits


WINDOW_S = 60
# Enough to poll ten resources a second and to deploy a hundred instances a minute. Much more would let one
# caller use most of a core.
REQUESTS: Final[Mapping[ActionClass, int]] = {
    ActionClass.READ: 600,
    ActionClass.WRITE: 120,
    ActionClass.EXEC: 60,
    ActionClass.STREAM: 300,  # long polls on a busy log return at once
}
# The limit of a project is this multiple of a caller's limit: more keys must not raise it without end.
PROJECT_FACTOR = 10
FAILED_ATTEMPTS = 30
# Four streams for each GPU of an 8-GPU node; each open stream uses memory.
STREAMS_PER_CALLER = 32
STREAMS_PER_PROJECT = 256  # leaves streams for other projects
# The agent allows 512 (`agent/streams/streams.py`), for all replicas and gateways together.
STREAMS_PER_PROJECT_AND_NODE = 16
STREAMS = 1024
STREAMS_RESERVED_FOR_ADMINS = 128
# A 429 takes half a millisecond of the event loop. Without a delay, a client can get 1,500 a second.
DELAY_S = 1.0
ANSWERS_PER_S = 50
MAX_DELAYED = 256
_MAX_KEYS = 100_000  # about 100 MiB if all of them are at their limit


@dataclass(frozen=True, slots=True)
class Count:
    """The state of a key after a request.

    Attributes:
        admitted: whether the request is within the limit.
        remaining: how many more requests are within the limit now.
        more_in_s: whole seconds until `remaining` grows or, if not admitted, until it would be admitted.
    """

    admitted: bool
    remaining: int
    more_in_s: int


class MovingWindow:
    """At most `limit` requests per key in any interval of `window_s`. Rejected requests do not count."""

    def __init__(self, limit: int, window_s: float = WINDOW_S, clock: Clock = time.monotonic) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._lock = Lock()
        # Times of requests by key, least recently used key first. No deque is empty.
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def take(self, key: str, cost: int = 1) -> Count:
        """Count `cost` requests if all of them are within the limit."""
        now = self._clock()
        with self._lock:
            times = self._times.get(key)
            if times is None:
                self._make_room(now)
                times = self._times[key] = deque()
            else:
                self._times.move_to_end(key)
                self._expire(times, now)
            admitted = len(times) + cost <= self._limit
            if admitted:
                times.extend(repeat(now, cost))
            over = 1 if admitted else len(times) + cost - self._limit
            return Count(admitted, self._limit - len(times), self._frees_in(times, now, over))

    def wait_s_of(self, key: str) -> int:
        """Whole seconds until another request would be within the limit (0: now). Counts nothing."""
        now = self._clock()
        with self._lock:
            times = self._times.get(key, ())
            live = [time_s for time_s in times if now - time_s < self._window_s]
            return self._frees_in(live, now) if len(live) >= self._limit else 0

    def _frees_in(self, times: deque[float] | list[float], now: float, count: int = 1) -> int:
        return max(1, ceil(times[count - 1] + self._window_s - now))

    def _expire(self, times: deque[float], now: float) -> None:
        while times and now - times[0] >= self._window_s:
            times.popleft()

    def _make_room(self, now: float) -> None:
        while self._times:
            oldest = next(iter(self._times.values()))
            if len(self._times) < _MAX_KEYS and now - oldest[-1] < self._window_s:
                return
            self._times.popitem(last=False)


class RequestRates:
    """Rate limits per caller and, for API keys, per project, for each action class. Admins have none."""

    def __init__(self, *, on: bool, clock: Clock = time.monotonic) -> None:
        self._on = on
        self._callers = {each: _Rate(each, limit, clock) for each, limit in REQUESTS.items()}
        self._projects = {
            each: _Rate(each, limit * PROJECT_FACTOR, clock) for each, limit in REQUESTS.items()
        }

    def take(
        self, caller: Caller, action_class: ActionClass, cost: int = 1
    ) -> tuple[Headers, TooManyRequests | None]:
        """Count a request; return the headers of its answer, and the error if it exceeds a limit.

        Args:
            cost: as how many requests of its class the request counts (see `Rule.cost`).
        """
        if not self._on or caller.is_admin:
            return [], None
        headers, error = self._callers[action_class].take(caller.id, "you have made", cost)
        if error is not None or caller.project_id is None:
            return headers, error
        project_headers, error = self._projects[action_class].take(
            caller.project_id, "the keys of your project have together made", cost
        )
        return (headers if error is None else project_headers), error


class _Rate:
    """The limit of one action class, with its headers and error."""

    def __init__(self, action_class: ActionClass, limit: int, clock: Clock) -> None:
        self._class = action_class
        self._limit = limit
        self._window = MovingWindow(limit, clock=clock)
        self._policy = f'"{action_class}";q={limit};w={WINDOW_S}'.encode()

    def take(self, key: str, who: str, cost: int) -> tuple[Headers, TooManyRequests | None]:
        count = self._window.take(key, cost)
        state = f'"{self._class}";r={count.remaining};t={count.more_in_s}'.encode()
        headers = [(b"ratelimit-policy", self._policy), (b"ratelimit", state)]
        if count.admitted:
            return headers, None
        counts_as = "" if cost == 1 else f" (this one counts as {cost})"
        return headers, TooManyRequests(
            f"{who} {self._limit} requests of the class {self._class} within {WINDOW_S} s{counts_as}; "
            f"try again in {count.more_in_s} s",
            retry_after_s=count.more_in_s,
        )


class FailedAttempts:
    """Counts invalid credentials per client address (R24)."""

    def __init__(self, *, on: bool, clock: Clock = time.monotonic) -> None:
        self._on = on
        self._window = MovingWindow(FAILED_ATTEMPTS, clock=clock)

    def __len__(self) -> int:
        return len(self._window)

    @contextmanager
    def watched(self, address: str | None, *, trusted: bool = False) -> Iterator[None]:
        """Check a credential within this block; Unauthorized raised in it counts as a failure.

        Args:
            trusted: the credential was valid before, so it is checked in spite of earlier failures.

        Raises:
            TooManyRequests: too many recent failures from that address; the block was not entered.
        """
        if not self._on:
            yield
            return
        network = network_of(address)
        wait_s = 0 if trusted else self._window.wait_s_of(network)
        if wait_s:
            raise TooManyRequests(
                f"too many invalid credentials came from your address; try again in {wait_s} s",
                retry_after_s=wait_s,
            )
        try:
            yield
        except Unauthorized:
            self._window.take(network)
            raise


class DelayedAnswers:
    """Delays 429 answers, so that clients that retry at once do not flood the server.

    Each project, or each network of unauthenticated clients, gets 50 such answers a second, over up to 256
    connections. Beyond that the answer is immediate: a delayed answer occupies a connection, and connections
    are limited. For the event loop's thread only.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._delayed: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._delayed.total()

    async def wait(self, key: str) -> None:
        if self._delayed[key] >= MAX_DELAYED:
            return
        with counted(self._delayed, key):
            await self._sleep(max(DELAY_S, self._delayed[key] / ANSWERS_PER_S))


def decrement(counts: Counter[Key], key: Key) -> None:
    """Count one less; a key with nothing left takes no memory."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


@contextmanager
def counted(counts: Counter[Key], key: Key) -> Iterator[None]:
    """Count one more during the block."""
    counts[key] += 1
    try:
        yield
    finally:
        decrement(counts, key)


def network_of(address: str | None) -> str:
    """The network that one client controls: its IPv4 address, or its IPv6 /64. Empty if unknown."""
    try:
        ip = ip_address(address or "")
    except ValueError:
        return ""
    if not isinstance(ip, IPv6Address):
        return str(ip)
    return str(ip.ipv4_mapped) if ip.ipv4_mapped else ip.packed[:8].hex()


class OpenStreams:
    """Counts open streams, waits and commands. For the event loop's thread only."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def of_same_project(self, caller: Caller) -> int:
        """The open streams of the caller's project, or of the caller if an admin or without one project."""
        return self._open[caller.id if caller.is_admin else caller.project_id or caller.id]

    @contextmanager
    def opened(self, caller: Caller) -> Iterator[None]:
        """Count a stream as open during the block.

        Raises:
            TooManyStreams: the caller, their project or the server is at its limit.
        """
        if not caller.is_admin and self._open[caller.id] >= STREAMS_PER_CALLER:
            raise TooManyStreams(
                f"you have {STREAMS_PER_CALLER} streams, waits and commands open; close one first"
            )
        project = None if caller.is_admin else caller.project_id
        if project is not None and self._open[project] >= STREAMS_PER_PROJECT:
            raise TooManyStreams(
                f"your project has {STREAMS_PER_PROJECT} streams, waits and commands open; close one first"
            )
        if self._total >= STREAMS + (STREAMS_RESERVED_FOR_ADMINS if caller.is_admin else 0):
            raise TooManyStreams("this server has too many streams open; try again soon")
        keys = [caller.id] if project is None else [caller.id, project]
        self._open.update(keys)
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            for key in keys:
                decrement(self._open, key)


class NodeStreams:
    """Counts open logs and commands by node and project. For the event loop's thread only.

    All callers of a project count together.
    """

    def __init__(self, of_project: int = STREAMS_PER_PROJECT_AND_NODE) -> None:
        self._of_project = of_project
        self._open: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    @contextmanager
    def opened(self, node_id: str, project_id: str, *, is_admin: bool = False) -> Iterator[None]:
        """Count a stream as open during the block. Admins have no limit and are not counted.

        Raises:
            TooManyStreamsOnNode: the project is at its limit.
        """
        if is_admin:
            yield
            return
        key = node_id, project_id
        if self._open[key] >= self._of_project:
            raise TooManyStreamsOnNode(
                f"your project has {self._of_project} logs and commands open on the node of this "
                "instance; close one of them, then try again",
            )
        with counted(self._open, key):
            yield
