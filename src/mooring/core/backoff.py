"""How long to wait before the next try."""

from collections.abc import Callable
from dataclasses import dataclass


def backoff_s(retries: int, first_s: float, longest_s: float) -> float:
    """Seconds before the next try: doubled by each earlier retry, up to `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(retries, 64))  # a float overflows after 1,023 doublings


@dataclass(slots=True)
class Backoff:
    """Counts the retries since the last success. `jitter` returns a factor for each pause."""

    first_s: float
    longest_s: float
    jitter: Callable[[], float] = lambda: 1.0
    retries: int = 0

    def pause_s(self) -> float:
        """Seconds to wait after one more failure."""
        self.retries += 1
        return backoff_s(self.retries - 1, self.first_s, self.longest_s) * self.jitter()

    def reset(self) -> None:
        self.retries = 0
