"""Waiting for a condition, in place of sleeping for a time that is always too short or too long."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T | None], timeout_s: float = 10, interval_s: float = 0.01) -> T:
    """The first true answer of `predicate`; fails the test if it is not true when asked after the time.

    An answer is judged by when it was asked for: a busy machine may give it late.
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
