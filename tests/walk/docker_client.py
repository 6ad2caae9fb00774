"""`docker` and docker-py with the configuration of `GET /v1/docker-context`, against a gateway."""

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.testbed.images import BUSYBOX
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
        pid, terminal = pty.fork()
        if pid == 0:
            os.execvpe("docker", ["docker", *arguments], self.environment)
        output = b""
        typed = False
        try:
            while data := os.read(terminal, 65_536):
                output += data
                if not typed:
                    os.write(terminal, keys)
                    typed = True
        except OSError:  # the end of a terminal
            pass
        _pid, status = os.waitpid(pid, 0)
        os.close(terminal)
        return os.waitstatus_to_exitcode(status), output

    def library(self) -> Any:
        """A client of docker-py."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_CONFIG", self.environment["DOCKER_CONFIG"])
            return docker.DockerClient(base_url=self.host, timeout=60)

    def new(self, *flags: str, command: tuple[str, ...] = ("sleep", "100000")) -> str:
        """Start a container in the background. Returns its id."""
        return self.text("run", "-d", *SMALL, *flags, BUSYBOX, *command)
