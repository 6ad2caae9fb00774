"""`docker` and docker-py with the configuration of `GET /v1/docker-context`, against a gateway."""

import fcntl
import json
import os
import pty
import select
import signal
import socket
import socketserver
import subprocess
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.testbed.images import BUSYBOX
from tests.testbed.waiting import wait_until
from tests.walk.product import clean_environment

WITHIN_S = 60.0
SMALL = ("--memory", "64m", "--cpus", "0.1", "--storage-opt", "size=64M")


class DockerClient:
    """Runs the `docker` command as a person with this key does.

    Args:
        folder: of the configuration.
    """

    def __init__(self, host: str, key: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"HttpHeaders": {"Authorization": f"Bearer {key}"}}
        (folder / "config.json").write_text(json.dumps(config))
        self.host, self.key = host, key
        self.environment = {**clean_environment(), "DOCKER_HOST": host, "DOCKER_CONFIG": str(folder)}

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            ["docker", *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self, *arguments: str, given: bytes = b"", within_s: float = WITHIN_S
    ) -> "subprocess.CompletedProcess[bytes]":
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(given, timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            raise AssertionError(f"docker {arguments} did not end: {output!r} {errors!r}") from None
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def text(self, *arguments: str) -> str:
        """The output of a command that must succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, done
        return done.stdout.decode().strip()

    def typed(self, *arguments: str, keys: bytes) -> tuple[int, bytes]:
        """Run in a terminal, type the keys after the first output, and return exit code and output."""
        terminal = self.terminal(*arguments)
        terminal.read_until(b"")
        terminal.type(keys)
        return terminal.end(), terminal.output

    def terminal(self, *arguments: str, size: tuple[int, int] = (24, 80)) -> "Terminal":
        return Terminal(["docker", *arguments], self.environment, size)

    def library(self) -> Any:
        """A client of docker-py."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_CONFIG", self.environment["DOCKER_CONFIG"])
            return docker.DockerClient(base_url=self.host, timeout=60)

    def new(self, *flags: str, command: tuple[str, ...] = ("sleep", "100000")) -> str:
        """Start a container in the background. Returns its id."""
        return self.text("run", "-d", *SMALL, *flags, BUSYBOX, *command)


@contextmanager
def unix_socket(address: tuple[str, int], path: Path) -> Iterator[str]:
    """Within the block, a socket whose connections go to a TCP address. Yields its `DOCKER_HOST`.

    On plain TCP, Docker's client does not notice the detach keys, also with Docker itself.
    With TLS it does.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(address) as target, ThreadPoolExecutor(2) as pool:
                pool.submit(_copy, self.request, target)
                pool.submit(_copy, target, self.request)

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"unix://{path}"
        server.shutdown()
        thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Terminal:
    """A program in a terminal, as a person uses it.

    Args:
        size: rows and columns.
    """

    def __init__(self, argv: list[str], environment: dict[str, str], size: tuple[int, int]) -> None:
        self.output = b""
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            termios.tcsetwinsize(0, size)
            os.execvpe(argv[0], argv, environment)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size; the kernel sends SIGWINCH to the program."""
        termios.tcsetwinsize(self._terminal, (rows, columns))

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def press(self, *keys: bytes) -> None:
        """Type keys as a person does: the program reads each before the next."""
        for key in keys:
            self.type(key)
            wait_until(self._has_read, WITHIN_S)

    def _has_read(self) -> bool:
        try:
            own = os.open(f"/proc/{self._pid}/fd/0", os.O_RDONLY | os.O_NOCTTY)
        except FileNotFoundError:  # it has ended
            return True
        try:
            left = fcntl.ioctl(own, termios.FIONREAD, b"\0" * 4)
        finally:
            os.close(own)
        return not any(left)

    def read_until(self, wanted: bytes) -> None:
        """Read until new output has these bytes; empty: any output."""
        began = len(self.output)
        while not self.output[began:] or wanted not in self.output[began:]:
            assert self._read(), f"the program has ended: {self.output!r}"

    def rest(self) -> bytes:
        """Read until the program ends. Returns all of its output."""
        self.end()
        return self.output

    def end(self) -> int:
        """Read until the program ends. Returns its exit code."""
        while self._read():
            pass
        _pid, status = os.waitpid(self._pid, 0)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Read what there is. Returns False at the end."""
        ready, _, _ = select.select([self._terminal], [], [], WITHIN_S)
        if not ready:
            os.kill(self._pid, signal.SIGKILL)
            raise AssertionError(f"no output within {WITHIN_S:g} s: {self.output!r}")
        try:
            data = os.read(self._terminal, 65_536)
        except OSError:  # the end of a terminal
            return False
        self.output += data
        return bool(data)
