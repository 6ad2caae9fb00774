"""How much input SSH clients may send ahead: the windows of their channels.

asyncssh keeps what a slow program has not taken yet, up to the window of the channel.
"""

from collections import Counter
from typing import Final

# Of each channel at first. A terminal, or a stream that only receives, never needs more.
SMALL_WINDOW: Final = 32 * 1024
LARGE_WINDOW: Final = 2 * 1024 * 1024
# Of the large windows of a project, and of all. asyncssh may keep one window, and `copying` another.
_PROJECT_BYTES: Final = 256 * 1024 * 1024
_BYTES: Final = 1024 * 1024 * 1024
_NEEDED: Final = 2 * LARGE_WINDOW


class Windows:
    """The large windows in use. For the event loop's thread only."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()  # bytes, by project

    def take(self, project: str) -> bool:
        """Count a large window. Returns False if there is no room: the channel goes on with its small one."""
        left = min(_PROJECT_BYTES - self._taken[project], _BYTES - self._taken.total())
        if left < _NEEDED:
            return False
        self._taken[project] += _NEEDED
        return True

    def give_back(self, project: str) -> None:
        self._taken[project] -= _NEEDED
        if not self._taken[project]:
            del self._taken[project]
