"""How much input SSH clients may send ahead: the windows of their channels.

asyncssh keeps what a slow program has not taken yet, up to the window of the channel.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Of a channel whose stream is not open yet.
SMALLEST_WINDOW: Final = 32 * 1024
_WINDOW: Final = 2 * 1024 * 1024
# Of the open streams of a project, and of all; further ones keep the smallest window, which is slower.
_PROJECT_BYTES: Final = 256 * 1024 * 1024
_BYTES: Final = 1024 * 1024 * 1024


class Windows:
    """The windows of all channels whose streams are open. For the event loop's thread only."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()  # by project

    @contextmanager
    def taken(self, project: str) -> Iterator[int]:
        """The size of a window, in bytes, which is in use until the end of the block."""
        left = min(_PROJECT_BYTES - self._taken[project], _BYTES - self._taken.total())
        size = max(min(_WINDOW, left), SMALLEST_WINDOW)
        self._taken[project] += size
        try:
            yield size
        finally:
            self._taken[project] -= size
            if not self._taken[project]:
                del self._taken[project]
