"""Users under faults: what they asked for, what was acknowledged, and how each request ended."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from uuid import UUID

import httpx

from tests.invariants.acknowledged import Acknowledged
from tests.service import Client
from tests.testbed import images
from tests.testbed.waiting import wait_until

SMALL: dict[str, Any] = {"image": images.BUSYBOX, "cpus": 0.1, "memory_mib": 64, "disk_mib": 64}
TIMEOUT_S = 60
ANSWERED_WITHIN_S = 60
_RETRY_S = 0.3
_MOST_OWN = 4  # instances of one client
# Any other answer is an error of Mooring: overload, outages and nodes that do not answer have theirs.
_EXPECTED = frozenset({200, 201, 202, 404, 409, 429, 503, 504})
_NOT_YET = frozenset({409, 429, 500, 502, 503, 504})


class Statistics:
    """How the requests of one trial ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.statuses: Counter[int] = Counter()  # 0: no answer
        self.slowest_s = 0.0
        self.problems: list[str] = []

    def add(self, status: int, took_s: float) -> None:
        with self._lock:
            self.statuses[status] += 1
            self.slowest_s = max(self.slowest_s, took_s)

    def add_problem(self, text: str) -> None:
        with self._lock:
            if len(self.problems) < 20:
                self.problems.append(text)

    def __str__(self) -> str:
        words = {0: "without an answer"}
        failed = [
            f"{count} x {words.get(status, status)}"
            for status, count in sorted(self.statuses.items())
            if status == 0 or status >= 429
        ]
        return ", ".join([f"{self.statuses.total()} requests", *failed])


class Clients:
    """Threads that create, use, stop, start, restart and delete instances of their own."""

    def __init__(self, url: str, rng: Random, *, count: int = 4, per_s: float = 8.0) -> None:
        self.history = Acknowledged()
        self.statistics = Statistics()
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._ended = threading.Event()
        self._busy = 0
        self._threads = [
            threading.Thread(target=_User(self, url, Random(rng.random()), number, count / per_s).run)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def resume(self) -> None:
        self._gate.set()

    def pause(self) -> None:
        """Begin no new operation, and wait until each begun one is acknowledged or rejected."""
        self._gate.clear()
        wait_until(lambda: not self._busy, ANSWERED_WITHIN_S)

    def end(self) -> None:
        self._ended.set()
        self._gate.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S + ANSWERED_WITHIN_S)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def rest(self, seconds: float) -> None:
        """Return after this time, or when the clients end."""
        self._ended.wait(seconds)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Waits while the clients are paused."""
        while True:
            self._gate.wait()
            with self._lock:
                if self._gate.is_set():
                    self._busy += 1
                    break
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1

    def asked(self, name: str) -> None:
        with self._lock:
            self.history.unknown.add(name)

    def acknowledged(self, name: str, instance_id: str) -> None:
        with self._lock:
            self.history.creates[name].add(instance_id)
            self.history.unknown.discard(name)

    def rejected(self, name: str) -> None:
        with self._lock:
            self.history.unknown.discard(name)

    def deleted(self, instance_id: str) -> None:
        with self._lock:
            self.history.deletes.add(instance_id)


class _User:
    """One user, who knows which of the instances exist: only this user changes them."""

    def __init__(self, clients: Clients, url: str, rng: Random, number: int, pause_s: float) -> None:
        self._clients, self._rng, self._number, self._pause_s = clients, rng, number, pause_s
        self._http = Client(url)
        self._http.timeout = httpx.Timeout(TIMEOUT_S)
        self._made = 0
        self._own: list[str] = []

    def run(self) -> None:
        with self._http:
            while not self._clients.has_ended:
                with self._clients.operation():
                    if not self._clients.has_ended:
                        self._operate()
                self._clients.rest(self._rng.uniform(0, 2 * self._pause_s))

    def _operate(self) -> None:
        if not self._own:
            self._create()
            return
        can_create = len(self._own) < _MOST_OWN
        actions: list[tuple[Callable[[], None], int]] = [
            (self._create, 6 if can_create else 0), (self._delete, 2 if can_create else 6), (self._stop, 2),
            (self._start, 2), (self._restart, 1), (self._execute, 2), (self._logs, 2), (self._read, 3),
        ]  # fmt: skip
        (action,) = self._rng.choices([each for each, _ in actions], [weight for _, weight in actions])
        action()

    # --- operations that are repeated until they are acknowledged

    def _create(self) -> None:
        self._made += 1
        name = f"load-{self._number}-{self._made}"
        body = {
            **SMALL,
            "name": name,
            "gpus": {"count": self._rng.choice([1, 1, 1, 2, 4])},
            "restart": self._rng.choice(["never", "always"]),
            "on_node_loss": self._rng.choice(["keep", "keep", "replace"]),
        }
        headers = {"Idempotency-Key": str(UUID(int=self._rng.getrandbits(128), version=4))}
        self._clients.asked(name)
        answer = self._until_answered("POST", "/v1/instances", json=body, headers=headers)
        if answer is None:
            return
        if answer.status_code != 201:
            self._problem(f"the create of {name} was rejected: {answer.text[:300]}")
            self._clients.rejected(name)
            return
        made = str(answer.json()["id"])
        self._clients.acknowledged(name, made)
        self._own.append(made)
        if self._rng.random() < 0.1:
            again = self._send("POST", "/v1/instances", json=body, headers=headers)
            if again is not None and again.status_code == 201:
                self._clients.acknowledged(name, str(again.json()["id"]))

    def _delete(self) -> None:
        instance = self._rng.choice(self._own)
        answer = self._until_answered("DELETE", f"/v1/instances/{instance}")
        if answer is not None:
            if answer.status_code not in {202, 404}:
                self._problem(f"the delete of {instance} was rejected: {answer.text[:300]}")
            self._clients.deleted(instance)
            self._own.remove(instance)

    # --- operations whose outcome nobody relies on

    def _stop(self) -> None:
        self._act("stop", json={"timeout_s": 2})

    def _start(self) -> None:
        self._act("start")

    def _restart(self) -> None:
        self._act("restart")

    def _execute(self) -> None:
        self._act("exec", json={"command": ["echo", "here"], "timeout_s": 5})

    def _act(self, action: str, **options: Any) -> None:
        self._require_found(self._send("POST", self._path(action), **options))

    def _logs(self) -> None:
        self._require_found(self._send("GET", self._path("logs"), params={"tail": 5}))

    def _read(self) -> None:
        self._require_found(self._send("GET", self._path()))

    def _path(self, action: str = "") -> str:
        return "/".join(filter(None, ["/v1/instances", self._rng.choice(self._own), action]))

    def _require_found(self, answer: httpx.Response | None) -> None:
        if answer is not None and answer.status_code == 404:
            self._problem(f"I2: an acknowledged instance is not found: {answer.request.url}")

    # --- requests

    def _until_answered(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """The first answer that says that it was done or will not be; None: the clients have ended."""
        while not self._clients.has_ended:
            answer = self._send(method, path, **options)
            if answer is not None and answer.status_code not in _NOT_YET:
                return answer
            self._clients.rest(_RETRY_S)
        return None

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Send a request once; None: there was no answer, and it may have been done."""
        began = time.monotonic()
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError:
            self._clients.statistics.add(0, time.monotonic() - began)
            return None
        except AssertionError as failure:  # the answer is not one that the API declares
            self._problem(str(failure))
            return None
        self._clients.statistics.add(answer.status_code, time.monotonic() - began)
        if answer.status_code not in _EXPECTED:
            self._problem(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer

    def _problem(self, text: str) -> None:
        self._clients.statistics.add_problem(text)
