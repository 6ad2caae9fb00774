"""An attached instance: its start, its output, its input, and Ctrl-C."""

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from mooring_client.calls import path
from mooring_client.cli.exits import Exit
from mooring_client.cli.instances import end_of
from mooring_client.cli.progress import Progress
from mooring_client.cli.session import ENDED, say
from mooring_client.cli.terminal import Input, raw_terminal, terminal_size
from mooring_client.errors import MooringError, NotFound
from mooring_client.failures import ClientFailure, StreamInterrupted
from mooring_client.stream_messages import Channel

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring
    from mooring_client.sync.streams import Command

_POLL_S: Final = 1
# A forecast costs the server as much as ten reads.
_FORECAST_EVERY_S: Final = 10.0


class Attached:
    """One attached instance.

    Args:
        stdin: pass the input of this process on.
        tty: the instance has a terminal: pass keys on as they are typed, Ctrl-C too.
        remove: delete the instance after its end.
    """

    def __init__(
        self, client: "Mooring", instance_id: str, name: str, *, stdin: bool, tty: bool, remove: bool
    ) -> None:
        self._client, self._id, self._name = client, instance_id, name
        self._stdin, self._tty, self._remove = stdin, tty, remove
        self._progress = Progress()
        self._forecast: str | None = None
        self._forecast_at = 0.0
        self._stopping = False

    def run(self) -> int:
        """Show the instance until its end; return the exit code."""
        work = _Background(self._show)
        while True:
            try:
                exit_code: int = work.result()
                break
            except KeyboardInterrupt:
                if self._stopping:
                    self._progress.end()
                    say(f"mooring: detached; {self._name} goes on: `mooring logs -f {self._name}`")
                    return Exit.INTERRUPTED
                self._stopping = True
                self._stop()
        if self._remove:
            with suppress(NotFound):
                self._client.instances.delete(self._id)
        return exit_code

    def _stop(self) -> None:
        self._progress.end()
        say(f"mooring: stopping {self._name}; Ctrl-C again leaves it running")
        with suppress(MooringError):  # it has ended already
            self._client.instances.stop(self._id)

    def _show(self) -> int:
        if (instance := self._started()) is None:
            return Exit.ERROR
        try:
            size = terminal_size() if self._tty else (None, None)
            with self._client.instances.attach(
                self._id, stdin=self._stdin, width=size[0], height=size[1]
            ) as found:
                self._copy(found)
                return Exit.ERROR if found.exit_code is None else found.exit_code
        except (StreamInterrupted, MooringError) as failure:
            return self._without_stream(failure, instance)

    def _started(self) -> Any:
        """Wait until the instance has started, and show what it waits for. None: it ended before."""
        url = path("/v1/instances/{}/wait", self._id)
        while True:
            answer = self._client.request(
                "GET", url, params={"state": "running", "timeout_s": _POLL_S}, extra_s=_POLL_S
            )
            instance = answer["instance"]
            if answer["reached"] or instance["exit_code"] is not None:
                self._progress.end()
                return instance
            if instance["state"] in ENDED:
                self._progress.end()
                reason = instance["reason"] or {"message": "no reason is known"}
                say(f"mooring: {self._name} {instance['state']} before it ran: {reason['message']}")
                return None
            self._progress.show(self._waits(instance))

    def _waits(self, instance: Any) -> str:
        text = f"{self._name} is {instance['state']}"
        if instance["queue_position"]:
            text += f", #{instance['queue_position']} in the queue"
        if instance["reason"]:
            text += f": {instance['reason']['message']}"
        if instance["state"] == "pending" and (starts_at := self._predicted()):
            text += f"; predicted start {starts_at}"
        return text

    def _predicted(self) -> str | None:
        if time.monotonic() - self._forecast_at >= _FORECAST_EVERY_S:
            with suppress(MooringError):
                answer = self._client.request("GET", path("/v1/instances/{}/explain", self._id))
                self._forecast = answer["starts_at"]
            self._forecast_at = time.monotonic()
        return self._forecast

    def _copy(self, command: "Command") -> None:
        outputs = {Channel.STDOUT: sys.stdout.fileno(), Channel.STDERR: sys.stderr.fileno()}
        with ExitStack() as exits:
            if self._tty:
                exits.enter_context(raw_terminal())
            if self._stdin:
                exits.enter_context(Input(command, tty=self._tty))
            for channel, data in command:
                write_all(outputs[channel], data)

    def _without_stream(self, failure: MooringError | StreamInterrupted, instance: Any) -> int:
        """Show the rest from the logs, which continue after a lost connection."""
        say(f"mooring: {failure}; continuing from the logs")
        with suppress(MooringError, ClientFailure):
            for line in self._client.instances.follow_logs(self._id, tail=0):
                print(line.line, file=sys.stderr if line.stream == "stderr" else sys.stdout, flush=True)
        return end_of(self._client, self._id)


def write_all(fd: int, data: bytes) -> None:
    """Write all data at once, without Python's buffer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Background:
    """A function in a thread, so that Ctrl-C in the main thread does not interrupt it in the middle."""

    def __init__(self, act: Any) -> None:
        self._ended = threading.Event()
        self._found: Any = None
        self._failure: BaseException | None = None
        self._act = act
        threading.Thread(target=self._run, name="attached", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = self._act()
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended.set()

    def result(self) -> Any:
        """Wait for the result. Raises what the function raised, or KeyboardInterrupt."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._found
