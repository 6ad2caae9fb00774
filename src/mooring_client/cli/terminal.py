"""The terminal of this process: raw mode, its size, and input for a command."""

import os
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from mooring_client.sync.streams import Command

_CHUNK_BYTES: Final = 32_768


def require_terminal() -> None:
    """Reject `-t` without a terminal.

    Raises:
        BadParameter: stdin is no terminal.
    """
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal here; leave out -t", param_hint="--tty")


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


def copy_input(command: "Command") -> None:
    """Start a thread that copies the input of this process to a command.

    It may wait for a key for ever, so it ends only with the input or with the process.
    """

    def copy() -> None:
        while data := os.read(sys.stdin.fileno(), _CHUNK_BYTES):
            command.write(data)
        command.close_stdin()

    threading.Thread(target=copy, name="input", daemon=True).start()
