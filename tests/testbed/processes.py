"""Real daemons as child processes, and simulated faults."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.testbed.waiting import wait_until

LOG_TAIL_BYTES = 6000
# Of a thread in /proc: stopped (T), or dead (Z, X).
STOPPED_STATES = "TZX"


class Daemon:
    """One program that runs until it is stopped. Its output goes to a file in its folder."""

    def __init__(
        self, name: str, argv: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._argv = list(argv)
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / f"{name}.log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    def start(self, ready: Callable[[], bool], timeout_s: float = 60) -> None:
        """Run the program, and return once `ready` returns true. Kill it and fail if that takes too long.

        The program has a session of its own, so it does not get the Ctrl-C of pytest. Its children inherit
        its working folder, by which a later run finds the processes of a killed run.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: not self.running or ready(), timeout_s)
        except AssertionError:
            self.kill()
            raise AssertionError(
                f"{self.name}: not ready after {timeout_s:g} s:\n{self.log_tail()}"
            ) from None
        if not self.running:
            raise AssertionError(f"{self.name} ended with {self._process.poll()}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def stop(self, with_signal: signal.Signals = signal.SIGTERM, timeout_s: float = 30) -> None:
        """Stop the daemon. Fails if it does not end in time."""
        if self._process is None:
            return
        self._process.send_signal(with_signal)
        self._process.wait(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL. Children of the daemon may keep running."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Freeze the daemon: it keeps its sockets, but does not answer."""
        freeze(self.pid)

    def thaw(self) -> None:
        thaw(self.pid)


def freeze(pid: int) -> None:
    """Freeze a process, and return when all its threads have stopped.

    The signal is asynchronous: a thread that runs on another processor may still answer a request.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _is_stopped(pid))


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    try:
        return all(_state(thread) in STOPPED_STATES for thread in Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        # A thread ended meanwhile.
        return not Path(f"/proc/{pid}").exists()


def _state(thread: Path) -> str:
    """Return a thread's state: the field after the name, which is in parentheses and may contain more."""
    return (thread / "stat").read_text().rpartition(") ")[2][0]


def kill_all(find: Callable[[], Iterable[int]]) -> None:
    """Kill what `find` returns until it returns nothing: a process may start another meanwhile."""

    def none_left() -> bool:
        pids = set(find()) - {os.getpid()}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(none_left, 30, 0.02)


def processes_within(folder: Path) -> list[int]:
    """Return the processes whose working folder is in `folder`; zombies have none."""
    inside = f"{folder}/"
    return [pid for pid in _all_pids() if f"{_working_folder(pid)}/".startswith(inside)]


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _working_folder(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
