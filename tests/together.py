"""Many callers at one moment."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def together(count: int, act: Callable[[int], T]) -> list[T]:
    """What `act(0)` … `act(count - 1)` give, each in a thread of its own, all let go at once."""
    barrier = threading.Barrier(count)

    def one(number: int) -> T:
        barrier.wait(30)
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
