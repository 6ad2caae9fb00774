"""Concurrent calls."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_concurrently(count: int, act: Callable[[int], T]) -> list[T]:
    """The results of `act(0)` … `act(count - 1)`, called at the same time in one thread each."""
    barrier = threading.Barrier(count)

    def one(number: int) -> T:
        barrier.wait(30)
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
