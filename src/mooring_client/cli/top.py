"""`mooring top`: GPUs and running instances, refreshed every two seconds."""

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from mooring_client.cli.exits import message_of
from mooring_client.cli.foreground import foreground
from mooring_client.cli.output import Format, show_one
from mooring_client.cli.resources import every
from mooring_client.cli.session import connect, project_id
from mooring_client.errors import MooringError
from mooring_client.failures import ClientFailure

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

_TIMEOUT_S: Final = 10.0
_KEYS_WITHIN_S: Final = 0.2
# The size of a terminal that does not know its size, such as a serial line.
_COLUMNS: Final = 80
_ROWS: Final = 24


def top(
    interval_s: Annotated[
        float, typer.Option("--interval", "-n", min=0.5, help="seconds between two readings")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print the tables once, and exit")] = False,
    output: Annotated[
        Literal["table", "json", "yaml"],
        typer.Option("--output", "-o", help="json and yaml: one object, printed once"),
    ] = "table",
) -> None:
    """Watch GPUs and running instances, until q or Ctrl-C. Without a terminal, print them once.

    - is a value that the GPU does not report, or that you may not see. The JSON is an object: `gpus` has the
    objects of GET /v1/gpus?samples=true, and `instances` those of GET /v1/instances?state=running.
    """
    if output != "table" or once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        with connect() as client:
            _print(_read(client, project_id(client)), Format(output))
        return
    # A thread uses it until the end of the process, so it is not closed.
    client = connect(timeout_s=_TIMEOUT_S, max_retries=0)
    screen = _Screen(_Refreshing(client, interval_s))
    foreground(screen.run, dict.fromkeys((signal.SIGINT, signal.SIGTERM), screen.leave))


@dataclass(frozen=True, slots=True)
class Seen:
    """What was read from the API.

    Attributes:
        gpus: the API's objects, each with its newest sample.
        instances: those that run.
        at: when, in seconds since 1970.
        failure: why it could not be read again; "": it could.
        failing_since: when that failed first.
    """

    gpus: list[Any]
    instances: list[Any]
    at: float
    failure: str = ""
    failing_since: float = 0.0


def _read(client: "Mooring", project: str | None) -> Seen:
    """Raises MooringError, ClientFailure."""
    gpus = sorted(every(client, "/v1/gpus", samples=True), key=lambda gpu: (gpu["node_name"], gpu["index"]))
    instances = list(every(client, "/v1/instances", state="running", project_id=project))
    return Seen(gpus, instances, time.time())


def _print(seen: Seen, output: Format) -> None:
    if output is Format.TABLE:
        from mooring_client.cli.top_view import lines

        print("\n".join(lines(seen)))
    else:
        show_one({"gpus": seen.gpus, "instances": seen.instances}, output, [])


class _Refreshing:
    """Reads again and again in a thread, so that the screen never waits for the server.

    Attributes:
        seen: the newest.
        ended_by: a failure that will not pass, such as an expired key.

    Raises:
        MooringError, ClientFailure: the first reading failed.
    """

    def __init__(self, client: "Mooring", interval_s: float) -> None:
        self._client, self._interval_s = client, interval_s
        self._project = project_id(client)
        self.seen = _read(client, self._project)
        self.ended_by: MooringError | None = None
        threading.Thread(target=self._run, name="refreshing", daemon=True).start()

    def _run(self) -> None:
        while self.ended_by is None:
            time.sleep(self._interval_s)
            try:
                self.seen = _read(self._client, self._project)
            except (MooringError, ClientFailure) as failure:
                if isinstance(failure, MooringError) and not failure.retryable:
                    self.ended_by = failure
                since = self.seen.failing_since or time.time()
                message = message_of(failure).removeprefix("mooring: ")
                self.seen = replace(self.seen, failure=message, failing_since=since)


class _Screen:
    """Shows what is read, until `leave` is called."""

    def __init__(self, refreshing: _Refreshing) -> None:
        self._refreshing = refreshing
        self._leaving = False

    def leave(self) -> None:
        self._leaving = True

    def run(self) -> None:
        """Raises MooringError: a failure that will not pass."""
        from rich.console import Console, ConsoleDimensions
        from rich.live import Live

        from mooring_client.cli.top_view import view

        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # names may have what the terminal cannot show
        console = Console()  # it heeds NO_COLOR
        shown: object = None
        with ExitStack() as exits:
            if sys.stdin.isatty():
                exits.enter_context(_single_keys())
            live = exits.enter_context(Live(console=console, screen=True, auto_refresh=False))
            while not self._leaving:
                if self._refreshing.ended_by is not None:
                    raise self._refreshing.ended_by
                # Rich takes the size from COLUMNS and LINES, if a shell exports them. These do
                # not follow the terminal.
                columns, rows = os.get_terminal_size(sys.stdout.fileno())
                console.size = size = ConsoleDimensions(columns or _COLUMNS, rows or _ROWS)
                seen, now = self._refreshing.seen, time.time()
                # While the server cannot be reached, the text changes every second.
                drawn = seen, size, int(now) if seen.failure else 0
                if drawn != shown:
                    live.update(view(seen, size, now), refresh=True)
                    shown = drawn
                if _leaves():
                    return


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys as they are typed, without showing them, within the block."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _leaves() -> bool:
    """Wait a short time for a key. True: it was q, or the terminal is gone."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        time.sleep(_KEYS_WITHIN_S)
        return False
    ready, _, _ = select.select([fd], [], [], _KEYS_WITHIN_S)
    return bool(ready) and os.read(fd, 1) in {b"q", b"Q", b""}
