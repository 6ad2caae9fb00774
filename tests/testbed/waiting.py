"""Waits for a condition instead of sleeping for a fixed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
MAX_PAUSE_S = 0.1


def wait_until(predicate: Callable[[], T | None], timeout_s: float = 10, interval_s: float = 0.01) -> T:
    """Return the first true result of `predicate`. Fails the test after the timeout.

    The pause between two calls is a tenth of the time waited so far, from `interval_s` to 0.1 s: many tests
    wait at the same time, and the calls use CPU time that the awaited work needs. The last call begins after
    the timeout, so that a slow call on a busy machine fails no test.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    while True:
        called_at = time.monotonic()
        result = predicate()
        if result:
            return result
        if called_at >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {predicate}")
        time.sleep(max(interval_s, min((time.monotonic() - began) / 10, MAX_PAUSE_S)))
