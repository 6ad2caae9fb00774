"""The terminal of this process: raw mode, its size, and input for a command."""

import os
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from mooring_client.sync.streams import Command

_CHUNK_BYTES: Final = 32_768


def terminal_size() -> tuple[int, int]:
    """Columns and rows of the terminal."""
    size = os.get_terminal_size(sys.stdin.fileno())
    return size.columns, size.lines


@contextmanager
def raw_terminal() -> Iterator[None]:
    """Pass every key on as it is typed, within the block."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class Input:
    """Copies the input of this process to a command, in a thread, within a `with` block."""

    def __init__(self, command: "Command", *, tty: bool) -> None:
        self._command, self._tty = command, tty
        self._thread = threading.Thread(target=self._copy, name="input", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The thread may wait for a key for ever; it ends with the process."""

    def _copy(self) -> None:
        size = terminal_size() if self._tty else None
        while data := os.read(sys.stdin.fileno(), _CHUNK_BYTES):
            if self._tty and (now := terminal_size()) != size:
                size = now
                self._command.resize(*now)
            self._command.write(data)
        self._command.close_stdin()
