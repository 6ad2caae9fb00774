"""An attached instance: its start, its output, its input, and Ctrl-C."""

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from mooring_client.calls import path
from mooring_client.cli.exits import Exit, message_of
from mooring_client.cli.foreground import foreground
from mooring_client.cli.instances import end_of
from mooring_client.cli.progress import Progress
from mooring_client.cli.session import ENDED, say
from mooring_client.cli.terminal import copy_input, raw_terminal, terminal_size
from mooring_client.errors import InvalidTransition, MooringError, NotFound
from mooring_client.failures import ClientFailure, ConnectionFailed, StreamInterrupted
from mooring_client.reconnecting import DEFAULT_RECONNECT_S, Reconnecting
from mooring_client.stream_messages import Channel

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring
    from mooring_client.sync.streams import Command

_POLL_S: Final = 1
# A forecast costs the server as much as ten reads.
_FORECAST_EVERY_S: Final = 10.0
# The kernel first sends the signal of Ctrl-C, and then discards the terminal's output (`isig` in n_tty.c).
_FLUSHED_AFTER_S: Final = 0.02
_REPEATED: Final = 10


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
        # Its first use imports the schemas and WebSockets for some 100 ms: here, while the instance starts.
        self._instances = client.instances
        self._stdin, self._tty, self._remove = stdin, tty, remove
        self._progress = Progress()
        self._forecast: str | None = None
        self._forecast_at = 0.0
        self._stopping = False
        self._command: Command | None = None

    def run(self) -> int:
        """Show the instance until its end; return the exit code."""
        try:
            exit_code = foreground(
                self._show, {signal.SIGINT: self._interrupted, signal.SIGWINCH: self._resized}
            )
        except _Detached:
            say(f"mooring: detached; {self._name} goes on: `mooring logs -f {self._name}`")
            return Exit.INTERRUPTED
        if self._remove:
            with suppress(NotFound):
                self._instances.delete(self._id)
        return exit_code

    def _interrupted(self) -> None:
        time.sleep(_FLUSHED_AFTER_S)
        self._progress.end()
        if self._stopping:
            raise _Detached
        self._stopping = True
        say(f"mooring: stopping {self._name}; Ctrl-C again leaves it running")
        # In a thread of its own, so that a second Ctrl-C need not wait for the server.
        threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def _stop(self) -> None:
        try:
            self._instances.stop(self._id)
        except InvalidTransition:
            return  # it has ended already
        except (MooringError, ClientFailure) as failure:
            say(message_of(failure))

    def _resized(self) -> None:
        if self._tty and self._command is not None:
            self._command.resize(*terminal_size())

    def _show(self) -> int:
        if not self._started():
            return Exit.INTERRUPTED if self._stopping else Exit.ERROR
        try:
            size = terminal_size() if self._tty else (None, None)
            with self._instances.attach(self._id, stdin=self._stdin, width=size[0], height=size[1]) as found:
                self._command = found
                self._copy(found)
                return end_of(self._client, self._id) if found.exit_code is None else found.exit_code
        except (StreamInterrupted, ConnectionFailed, MooringError) as failure:
            return self._without_stream(failure)

    def _started(self) -> bool:
        """Wait until the instance has started, and show what it waits for. False: it ended before."""
        url, params = path("/v1/instances/{}/wait", self._id), {"state": "running", "timeout_s": _POLL_S}
        reconnecting = Reconnecting(DEFAULT_RECONNECT_S)
        while True:
            try:
                answer = self._client.request("GET", url, params=params, extra_s=_POLL_S)
                reconnecting.connected()
            except ConnectionFailed as failure:
                self._progress.show(f"{failure}; trying again")
                time.sleep(reconnecting.pause_after(failure))
                continue
            instance = answer["instance"]
            if answer["reached"] or instance["exit_code"] is not None:
                self._progress.end()
                return True
            if instance["state"] in ENDED:
                self._progress.end()
                reason = instance["reason"] or {"message": "no reason is known"}
                say(f"mooring: {self._name} {instance['state']} before it ran: {reason['message']}")
                return False
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
                copy_input(command)
            for channel, data in command:
                write_all(outputs[channel], data)

    def _without_stream(self, failure: MooringError | ClientFailure) -> int:
        """Show the rest from the logs, which continue after a lost connection."""
        say(f"mooring: {failure}; continuing from the logs, with the last {_REPEATED} lines again")
        say(f"mooring: the whole output: mooring logs --tail 10000 {self._name}")
        for line in self._instances.logs(self._id, tail=_REPEATED, follow=True):
            print(line.line, file=sys.stderr if line.stream == "stderr" else sys.stdout, flush=True)
        return end_of(self._client, self._id)


def write_all(fd: int, data: bytes) -> None:
    """Write all data at once, without Python's buffer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Detached(Exception):
    """The user left the instance running."""
