"""What `mooring cp` tells while it works: progress in a terminal, and which files it leaves out."""

import sys
import time
from types import TracebackType
from typing import Final, Self

from mooring_client.cli.output import size
from mooring_client.cli.progress import Progress
from mooring_client.cli.session import say
from mooring_client.terminal_text import clean_line

_EVERY_S: Final = 0.2
_MOST_MESSAGES: Final = 20
_MIB: Final = 1024 * 1024


class Report:
    """Counts bytes and files.

    Attributes:
        left_out: how many files were not copied.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._progress = Progress() if sys.stderr.isatty() else None
        self._bytes = 0
        self._expected: int | None = None
        self._began_at = self._shown_at = time.monotonic()

    def expect(self, size_bytes: int) -> None:
        """Say how many bytes will come."""
        self._expected = size_bytes

    def copied(self, size_bytes: int) -> None:
        """Count bytes, and show the progress from time to time."""
        self._bytes += size_bytes
        now = time.monotonic()
        if self._progress is not None and now - self._shown_at >= _EVERY_S:
            self._shown_at = now
            self._progress.show(self._text(now - self._began_at))

    def skipped(self, message: str) -> None:
        """Count a file that is not copied, and say why."""
        self.left_out += 1
        if self.left_out <= _MOST_MESSAGES:
            self.tell(message)

    def tell(self, message: str) -> None:
        """Print a message, which may contain text of the container."""
        if self._progress is not None:
            self._progress.end()
        say(f"mooring: {clean_line(message)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the progress, and say how many messages are missing."""
        if self._progress is not None:
            self._progress.end()
        if self.left_out > _MOST_MESSAGES:
            self.tell(f"{self.left_out} files were left out; the first {_MOST_MESSAGES} are listed")

    def _text(self, seconds: float) -> str:
        copied = self._bytes / _MIB
        of = f" of {size(round(self._expected / _MIB, 1))}" if self._expected else ""
        return f"copied {size(round(copied, 1))}{of}, {size(round(copied / seconds, 1))}/s"
