"""How much one caller may do: requests a minute, streams at once, and guesses at credentials.

All counts are this replica's own and live in its memory: N replicas behind a proxy let N times as much pass.
The `limits` package was measured for this and cost 0.1 to 0.4 ms a request (its memory store starts a thread
after each quiet moment, which looks at every key): more than all the rest of the gate.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from itertools import repeat
from math import ceil
from threading import Lock
from typing import Final

from mooring.api.auth.rules import ActionClass
from mooring.core.access import Caller
from mooring.core.errors import TooManyRequests, Unauthorized

Clock = Callable[[], float]
Headers = list[tuple[bytes, bytes]]

WINDOW_S = 60
# A program that polls ten things a second, a person who scripts, a deploy of a hundred instances: all fit;
# what is refused would take one caller most of a core.
REQUESTS: Final[Mapping[ActionClass, int]] = {
    ActionClass.READ: 600,
    ActionClass.WRITE: 120,
    ActionClass.EXEC: 60,
    ActionClass.STREAM: 300,  # a long poll on a busy log is answered at once, again and again
}
# A project's keys together may make as many times more: whoever makes keys would else have no limit.
KEYS_AT_FULL_RATE = 10
FAILED_ATTEMPTS = 30
# A caller with 32 streams follows a whole 8-GPU node four times over; what is open is held in memory.
STREAMS_OF_ONE = 32
STREAMS_OF_PROJECT = 256  # so that no project takes all there are
# Of one project's instances on one node: each uses a thread there. `agent/sync/worker_pools.py` enforces it.
STREAMS_OF_PROJECT_ON_NODE = 16
STREAMS = 1024
STREAMS_KEPT_FOR_ADMINS = 128
# A refusal takes half a millisecond of the event loop; clients in a loop were refused 1,500 times a second.
HELD_S = 1.0
REFUSALS_PER_S = 50
MOST_HELD = 256
_MOST_KEYS = 100_000  # about 100 MiB, were all of them at their limit


@dataclass(frozen=True, slots=True)
class Count:
    """Where a key stands.

    Attributes:
        admitted: whether this one had room.
        remaining: how many more have room now.
        more_in_s: whole seconds until there is room for one more than that, or for this one if it had none.
    """

    admitted: bool
    remaining: int
    more_in_s: int


class MovingWindow:
    """At most so many per key in any stretch of `window_s`. What is refused is not counted."""

    def __init__(self, most: int, window_s: float = WINDOW_S, clock: Clock = time.monotonic) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._lock = Lock()
        # Moments by key, the key looked at longest ago first. None is empty.
        self._moments: OrderedDict[str, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._moments)

    def take(self, key: str, cost: int = 1) -> Count:
        """Count `cost` more, if there is room for all of it."""
        now = self._clock()
        with self._lock:
            moments = self._moments.get(key)
            if moments is None:
                self._make_room(now)
                moments = self._moments[key] = deque()
            else:
                self._moments.move_to_end(key)
                self._expire(moments, now)
            admitted = len(moments) + cost <= self._most
            if admitted:
                moments.extend(repeat(now, cost))
            over = 1 if admitted else len(moments) + cost - self._most
            return Count(admitted, self._most - len(moments), self._frees_in(moments, now, over))

    def full_for_s(self, key: str) -> int:
        """Whole seconds until there is room for one, without counting it; 0: there is."""
        now = self._clock()
        with self._lock:
            moments = self._moments.get(key, ())
            live = [moment for moment in moments if now - moment < self._window_s]
            return self._frees_in(live, now) if len(live) >= self._most else 0

    def _frees_in(self, moments: deque[float] | list[float], now: float, places: int = 1) -> int:
        return max(1, ceil(moments[places - 1] + self._window_s - now))

    def _expire(self, moments: deque[float], now: float) -> None:
        while moments and now - moments[0] >= self._window_s:
            moments.popleft()

    def _make_room(self, now: float) -> None:
        while self._moments:
            oldest = next(iter(self._moments.values()))
            if len(self._moments) < _MOST_KEYS and now - oldest[-1] < self._window_s:
                return
            self._moments.popitem(last=False)


class RequestRates:
    """Requests per caller and class of action, and per project of keys. Admins have no limit."""

    def __init__(self, *, on: bool, clock: Clock = time.monotonic) -> None:
        self._on = on
        self._callers = {kind: _Rate(kind, most, clock) for kind, most in REQUESTS.items()}
        self._projects = {
            kind: _Rate(kind, most * KEYS_AT_FULL_RATE, clock) for kind, most in REQUESTS.items()
        }

    def take(
        self, caller: Caller, kind: ActionClass, cost: int = 1
    ) -> tuple[Headers, TooManyRequests | None]:
        """Count a request: the headers that its answer bears, and the refusal if it was one too many.

        Args:
            cost: how many ordinary requests of its class it counts as (see `Rule.cost`).
        """
        if not self._on or caller.is_admin:
            return [], None
        headers, refusal = self._callers[kind].take(caller.id, "you have made", cost)
        if refusal is not None or caller.project_id is None:
            return headers, refusal
        of_project, refusal = self._projects[kind].take(
            caller.project_id, "the keys of your project have together made", cost
        )
        return (headers if refusal is None else of_project), refusal


class _Rate:
    """The limit of one class of action, and what is said of it."""

    def __init__(self, kind: ActionClass, most: int, clock: Clock) -> None:
        self._kind = kind
        self._most = most
        self._window = MovingWindow(most, clock=clock)
        self._policy = f'"{kind}";q={most};w={WINDOW_S}'.encode()

    def take(self, key: str, who: str, cost: int) -> tuple[Headers, TooManyRequests | None]:
        count = self._window.take(key, cost)
        state = f'"{self._kind}";r={count.remaining};t={count.more_in_s}'.encode()
        headers = [(b"ratelimit-policy", self._policy), (b"ratelimit", state)]
        if count.admitted:
            return headers, None
        counts_as = "" if cost == 1 else f" (this one counts as {cost})"
        return headers, TooManyRequests(
            f"{who} {self._most} requests of the class {self._kind} within {WINDOW_S} s{counts_as}; "
            f"there is room again in {count.more_in_s} s",
            retry_after_s=count.more_in_s,
        )


class FailedAttempts:
    """Credentials that stood for nobody, per address of a client (R24)."""

    def __init__(self, *, on: bool, clock: Clock = time.monotonic) -> None:
        self._on = on
        self._window = MovingWindow(FAILED_ATTEMPTS, clock=clock)

    def __len__(self) -> int:
        return len(self._window)

    @contextmanager
    def watched(self, address: str | None, *, trusted: bool = False) -> Iterator[None]:
        """Look at a credential within this block.

        Args:
            trusted: it was good a while ago, so it is no guess, whatever others at that address do.

        Raises:
            TooManyRequests: too many of that address were bad of late; the block was not entered.
        """
        if not self._on:
            yield
            return
        network = network_of(address)
        wait_s = 0 if trusted else self._window.full_for_s(network)
        if wait_s:
            raise TooManyRequests(
                f"too many bad credentials came from your address; the next is looked at in {wait_s} s",
                retry_after_s=wait_s,
            )
        try:
            yield
        except Unauthorized:
            self._window.take(network)
            raise


class HeldBack:
    """Refusals (429) that are answered late, so that asking again at once is no flood of its own.

    One project, or one network of those that nobody knows, is refused 50 times a second over up to 256
    connections. Beyond that it is answered at once: what is held back keeps a connection, of which all have a
    limited number. For the event loop's thread only.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    async def hold(self, key: str) -> None:
        """Wait with the answer."""
        if self._held[key] >= MOST_HELD:
            return
        self._held[key] += 1
        try:
            await self._sleep(max(HELD_S, self._held[key] / REFUSALS_PER_S))
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]


def network_of(address: str | None) -> str:
    """What one client can choose its addresses from: itself, and with IPv6 its /64."""
    try:
        ip = ip_address(address or "")
    except ValueError:
        return ""
    if not isinstance(ip, IPv6Address):
        return str(ip)
    return str(ip.ipv4_mapped) if ip.ipv4_mapped else ip.packed[:8].hex()


class OpenStreams:
    """What is being answered for longer than a moment. For the event loop's thread only."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def of_same_project(self, caller: Caller) -> int:
        """How many the caller's project has open; of somebody with no single project, how many they have."""
        return self._open[caller.id if caller.is_admin else caller.project_id or caller.id]

    @contextmanager
    def opened(self, caller: Caller) -> Iterator[None]:
        """Hold a place for the length of the block.

        Raises:
            TooManyRequests: code `too_many_streams`: the caller, its project's keys, or all have none left.
        """
        if not caller.is_admin and self._open[caller.id] >= STREAMS_OF_ONE:
            raise TooManyRequests(
                f"you have {STREAMS_OF_ONE} streams, waits and commands open; close one first",
                code="too_many_streams",
            )
        project = None if caller.is_admin else caller.project_id
        if project is not None and self._open[project] >= STREAMS_OF_PROJECT:
            raise TooManyRequests(
                f"your project has {STREAMS_OF_PROJECT} streams, waits and commands open; close one first",
                code="too_many_streams",
            )
        if self._total >= STREAMS + (STREAMS_KEPT_FOR_ADMINS if caller.is_admin else 0):
            raise TooManyRequests(
                "this server has as many streams open as it can bear; try again soon", code="too_many_streams"
            )
        counted = [caller.id] if project is None else [caller.id, project]
        self._open.update(counted)
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._open.subtract(counted)
            for key in counted:
                if not self._open[key]:
                    del self._open[key]


class NodeStreams:
    """Logs and commands that nodes bring, by node and project. For the event loop's thread only.

    Who asks does not matter: all keys and people of a project ask the node for the same threads.
    """

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    @contextmanager
    def opened(self, node_id: str, project_id: str, *, is_admin: bool = False) -> Iterator[None]:
        """Hold a place for the length of the block. Admins have no limit, and take no project's places.

        Raises:
            TooManyRequests: code `too_many_streams_on_node`.
        """
        if is_admin:
            yield
            return
        key = node_id, project_id
        if self._open[key] >= STREAMS_OF_PROJECT_ON_NODE:
            raise TooManyRequests(
                f"your project has {STREAMS_OF_PROJECT_ON_NODE} logs and commands open on the node of this "
                "instance; close one of them, then try again",
                code="too_many_streams_on_node",
            )
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
