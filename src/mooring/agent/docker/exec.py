"""Runs a command in a container and yields its output and exit code as frames."""

import codecs
import logging
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

from mooring.agent.docker.client import Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams import ByteStream, Demultiplexer, StreamName
from mooring.agent.runtime import RuntimeUnavailable
from mooring.schemas.agent_streams import ExecRequest, StreamFrame

_KEEP_ALIVE_S = 10.0
_RECORDED_WITHIN_S = 2.0  # the engine records the pid after the output begins, the exit code after it ends
_POLL_S = 0.01

PROC = Path("/proc")

log = logging.getLogger(__name__)


def exec_frames(
    engine: Engine, container_id: str, request: ExecRequest
) -> Generator[StreamFrame, None, None]:
    """Yield frames; the last one has `exit_code` or `error`. Closing the iterator kills the command.

    Raises:
        RuntimeUnavailable: the connection to the engine was lost.
    """
    try:
        exec_id = engine.exec_create(container_id, request.command)
        stream = engine.stream(
            "POST", f"/exec/{exec_id}/start", json={"Tty": False, "Detach": False}, headers_in_s=10
        )
        yield from _run(engine, stream, exec_id, container_id, request)
    except EngineRefused as refusal:
        if refusal.status not in {404, 409}:
            raise
        yield StreamFrame.of_error("not_running", "the instance is not running; start it first")


def _run(
    engine: Engine, stream: ByteStream, exec_id: str, container_id: str, request: ExecRequest
) -> Iterator[StreamFrame]:
    ended = False
    try:
        ended = yield from _output(stream, request)
        if ended:
            yield StreamFrame(exit_code=_exit_code(engine, exec_id))
        else:
            message = f"the command did not end within {request.timeout_s} s and was killed"
            yield StreamFrame.of_error("exec_timeout", message)
    finally:
        # Kill also if the reader closed the iterator: nothing else would enforce the timeout then.
        if not ended:
            with suppress(RuntimeUnavailable):
                kill_exec(engine, exec_id, container_id)
        stream.close()


def _output(stream: ByteStream, request: ExecRequest) -> Generator[StreamFrame, None, bool]:
    """Yield the output. Return whether the command ended before its timeout."""
    deadline = time.monotonic() + request.timeout_s
    output = Output(request.max_output_bytes)
    while (left := deadline - time.monotonic()) > 0:
        chunk = stream.read(min(left, _KEEP_ALIVE_S))
        if chunk == b"":
            yield from output.rest()
            return True
        yield from output.frames(chunk) if chunk else [StreamFrame()]
    return False


class Output:
    """Decodes the output, each stream separately, up to a limit, and discards the rest."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._truncated = False
        self._demultiplexer = Demultiplexer()
        new_decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders: dict[StreamName, codecs.IncrementalDecoder] = {
            "stdout": new_decoder("replace"),
            "stderr": new_decoder("replace"),
        }

    def frames(self, chunk: bytes) -> Iterator[StreamFrame]:
        for stream, payload in self._demultiplexer.feed(chunk):
            kept, cut = payload[: self._left], len(payload) > self._left
            self._left -= len(kept)
            text = self._decoders[stream].decode(kept)
            if text or (cut and not self._truncated):
                yield StreamFrame(stream=stream, text=text, truncated=cut)
            self._truncated = self._truncated or cut

    def rest(self) -> Iterator[StreamFrame]:
        """Yield the replacements of characters that are still incomplete at the end of the output."""
        for stream, decoder in self._decoders.items():
            if not self._truncated and (text := decoder.decode(b"", final=True)):
                yield StreamFrame(stream=stream, text=text)


def kill_exec(engine: Engine, exec_id: str, container_id: str, proc: Path = PROC) -> bool:
    """Kill the process of an exec and its descendants. Return whether that was possible.

    The engine has no call for this, but reports the pid on the host, where a privileged agent can kill it.

    Raises:
        RuntimeUnavailable: the engine does not report the pid.
    """
    pid = _pid_of(engine, exec_id)
    if pid is None:
        return True
    # Stop each process before its children are listed: otherwise it could fork another after that.
    pids = [pid]
    for parent in pids:  # and the children that the loop adds
        if not _signal(parent, signal.SIGSTOP, container_id, proc):
            log.warning("the command of exec %s cannot be killed and still runs in its container", exec_id)
            return False
        pids += _children(parent, proc)
    killed = [_signal(each, signal.SIGKILL, container_id, proc) for each in pids]
    return all(killed)


def _pid_of(engine: Engine, exec_id: str) -> int | None:
    """Wait for the engine to record the pid of a running exec. Return it; None if the exec has ended."""
    until = time.monotonic() + _RECORDED_WITHIN_S
    while (state := engine.exec_state(exec_id))["Running"]:
        if state["Pid"]:
            return int(state["Pid"])
        if time.monotonic() > until:
            raise RuntimeUnavailable("the engine reports no process for a running command")
        time.sleep(_POLL_S)
    return None


def _signal(pid: int, number: signal.Signals, container_id: str, proc: Path) -> bool:
    """Return whether the signal was sent, or the process has ended."""
    try:
        # Pids are reused, and if the agent has its own pid namespace, the pid may be another process there.
        if container_id not in (proc / str(pid) / "cgroup").read_text():
            return False
        os.kill(pid, number)
    except (ProcessLookupError, FileNotFoundError):
        return True
    except PermissionError:
        return False
    return True


def _children(pid: int, proc: Path) -> list[int]:
    with suppress(OSError):
        children = (proc / str(pid) / "task" / str(pid) / "children").read_text()
        return [int(child) for child in children.split()]
    return []


def _exit_code(engine: Engine, exec_id: str) -> int:
    until = time.monotonic() + _RECORDED_WITHIN_S
    while time.monotonic() < until:
        state = engine.exec_state(exec_id)
        if state["ExitCode"] is not None and not state["Running"]:
            return int(state["ExitCode"])
        time.sleep(_POLL_S)
    # An engine that shuts down ends the stream while the command still runs.
    raise RuntimeUnavailable("the engine ended the output of a command that has not ended")
