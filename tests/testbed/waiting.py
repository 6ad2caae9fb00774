"""Waiting for a condition, in place of sleeping for a time that is always too short or too long."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T | None], timeout_s: float = 10, interval_s: float = 0.01) -> T:
    """The first true answer of `predicate`; fails the test when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {predicate}")
        time.sleep(interval_s)
