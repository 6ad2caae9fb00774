"""Waits for a condition instead of sleeping for a fixed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T | None], timeout_s: float = 10, interval_s: float = 0.01) -> T:
    """Return the first true result of `predicate`. Fails the test after the timeout.

    A call that began before the timeout may return after it, as on a busy machine.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked_at = time.monotonic()
        answer = predicate()
        if answer:
            return answer
        if asked_at >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {predicate}")
        time.sleep(interval_s)
