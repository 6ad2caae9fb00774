"""The child processes of `mooring up`: they end with it, and it ends if one of them fails."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

import typer


class ChildProcess:
    """A `mooring` command as a child process.

    Args:
        name: for messages, such as "local node".
        arguments: of the command.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        self._name, self._arguments = name, arguments
        self.exit_status = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def start(self, environment: Mapping[str, str]) -> None:
        # Its standard input is a pipe: when this process ends for any reason, the child reads end-of-file and
        # exits too.
        self._child = subprocess.Popen(  # noqa: S603 - a command of Mooring
            [sys.executable, "-m", "mooring.cli", *self._arguments],
            stdin=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # only the parent gets Ctrl-C, and then stops the child
        )
        threading.Thread(target=self._watch, args=(self._child,), name=self._name, daemon=True).start()

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not self._stopping and status != 0:
            typer.echo(f"the {self._name} ended with status {status}; stopping", err=True)
            self.exit_status = status
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(self, within_s: float) -> None:
        """Stop it, and kill it if it does not end in time."""
        self._stopping = True
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
