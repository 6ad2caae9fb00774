"""The parent's side of the NVML process: sends a JSON line and reads one back, with a deadline."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any, cast

READ_BYTES = 65_536


class ChildHungError(Exception):
    """No answer in time: a call hangs in the driver."""


class ChildEndedError(Exception):
    """The process is gone, or its answer is invalid."""


class NvmlChild:
    """A running `mooring.agent.nvml.process`. It ends when its stdin closes, so with this process too."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        # -P: a json.py in the working directory must not be imported. Own process group: Ctrl-C in a
        # terminal must reach only the agent, which then ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mooring.agent.nvml.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            process_group=0,
        )
        self._requests = cast(IO[bytes], self._process.stdin)
        self._answers = cast(IO[bytes], self._process.stdout)
        self.pid = self._process.pid

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to one request. After a ChildHungError or ChildEndedError the child is unusable."""
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ChildEndedError("The NVML process no longer reads requests") from error
        received = self._line(time.monotonic() + timeout_s, timeout_s)
        try:
            return cast(dict[str, Any], json.loads(received))
        except ValueError as error:
            raise ChildEndedError(f"The NVML process answered {received[:80]!r}") from error

    def kill(self) -> None:
        """Send SIGKILL without waiting: an uninterruptible call delays its effect."""
        self._process.kill()

    def reaped(self) -> bool:
        """Close the pipes and wait up to 0.5 s. Returns whether the process has ended."""
        self._requests.close()
        self._answers.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        received = b""
        while not received.endswith(b"\n"):
            if not self._readable(deadline - time.monotonic()):
                raise ChildHungError(f"NVML did not answer within {timeout_s:g} s")
            chunk = os.read(self._answers.fileno(), READ_BYTES)
            if not chunk:
                raise ChildEndedError("The NVML process ended")
            received += chunk
        return received

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(max(0, timeout_s) * 1000))
