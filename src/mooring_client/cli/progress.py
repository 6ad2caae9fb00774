"""Progress of a start on stderr: one line that changes in a terminal, a line per change elsewhere."""

import os
import sys
from typing import Final

from mooring_client.terminal_text import clean_line

# A terminal of another program may say that it has no columns.
_UNKNOWN_WIDTH: Final = 80


class Progress:
    """Shows the latest of several messages."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._last = ""

    def show(self, message: str) -> None:
        """Replace the message."""
        if message == self._last:
            return
        self._last = message
        if self._rewrites:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or _UNKNOWN_WIDTH
            sys.stderr.write(f"\r\x1b[K{clean_line(message)[: width - 1]}")
            sys.stderr.flush()
        else:
            print(clean_line(message), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the message from a terminal: what follows is the program's output."""
        if self._rewrites and self._last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._last = ""
