"""Starts `mooring` processes as forks of one process that has imported the product.

An import takes three seconds of CPU time, more than everything else that a server does for a test. The tests
of `mooring up`, of the README and of the agent's commands start Python themselves, as users do.
"""

import ctypes
import multiprocessing
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["mooring_client.cli.main", "mooring.cli.up", "mooring.agent.main"])


class ForkedProcess:
    """One `mooring` process with the part of the interface of `subprocess.Popen` that tests use.

    Args:
        command: the arguments of `mooring`.
        environment: all environment variables of the process.
        log: the file to which it appends its output.
        network: the network namespace to run in; None: this process's.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: Path, network: Path | None
    ) -> None:
        arguments = (command, dict(environment), log, network)
        self._process = _CONTEXT.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Return the exit status. Raises TimeoutExpired if the process is still running."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mooring", timeout_s)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        # The fork server reaps it, so it may have gone since it was last looked at.
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _run(command: list[str], environment: Mapping[str, str], log: Path, network: Path | None) -> None:
    """Become what `mooring COMMAND…` would be after an exec."""
    from mooring_client.cli.main import app  # noqa: PLC0415  imported by the parent

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    if network is not None:
        _enter(network)
    app(command, prog_name="mooring")


def _enter(network: Path) -> None:
    """Enter a network namespace, as nsenter does; Python has `os.setns` only from 3.12."""
    namespace = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns", str(network))
    os.close(namespace)
