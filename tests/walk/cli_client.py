"""The `mooring` command as a user runs it: as a process, alone or in a terminal."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pexpect

from tests.service import ADMIN_KEY
from tests.walk.product import clean_environment

WITHIN_S: Final = 30


class CliClient:
    """Runs `mooring` against one server.

    Args:
        folder: for the configuration of the command, which starts empty.

    Attributes:
        argv: the command without arguments.
    """

    argv = (sys.executable, "-m", "mooring.cli")

    def __init__(self, url: str, folder: Path, key: str = ADMIN_KEY) -> None:
        self.environment = clean_environment() | {
            "MOORING_URL": url,
            "MOORING_API_KEY": key,
            "MOORING_INSECURE_HTTP": "1",  # the test bed's addresses are not those of this machine's loopback
            "XDG_CONFIG_HOME": str(folder),
            "HOME": str(folder),
        }

    def run(self, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a command without a terminal."""
        argv, environment = [*self.argv, *arguments], self.environment
        return subprocess.run(
            argv, env=environment, input=given, capture_output=True, timeout=WITHIN_S, check=False
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command without a terminal; its streams are pipes."""
        pipe = subprocess.PIPE
        argv, environment = [*self.argv, *arguments], self.environment
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            preexec_fn=_default_signals,  # noqa: PLW1509
        )

    def terminal(self, *arguments: str) -> "pexpect.spawn[bytes]":
        """Start a command in a terminal of 80 x 24 characters."""
        argv, environment = [*self.argv, *arguments], self.environment | {"TERM": "xterm"}
        return pexpect.spawn(
            argv[0], argv[1:], env=environment, timeout=WITHIN_S, dimensions=(24, 80),
            preexec_fn=_default_signals,
        )  # fmt: skip


def _default_signals() -> None:
    """Tests that run in the background, as with nohup, ignore these signals, and so would the command."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
