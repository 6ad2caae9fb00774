"""Runs a command in a container, as a stream of its input and output."""

import asyncio
import time
from contextlib import suppress
from typing import Final

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams import processes
from mooring.agent.docker.streams.container_output import ContainerOutput
from mooring.agent.docker.streams.engine_streams import Document, EngineApi, EngineConnection
from mooring.agent.docker.streams.login_shell import ContainerShells, in_login_shell
from mooring.agent.runtime import RuntimeUnavailable, StreamRefused
from mooring.schemas.agent_streams import ExecRequest, StreamStatus, WindowSize
from mooring_client.schemas.paths import is_kernel_path, normal_path
from mooring_client.stream_messages import Channel

# The engine records the pid after the output begins, and the exit code after it ends.
_RECORDED_WITHIN_S: Final = 2.0
_POLL_S: Final = 0.01
# Each command has this variable with the id of the agent process that started it. So the next process finds
# the commands of one that was killed, and only those: an operator may run commands in containers too.
RUN_VARIABLE: Final = "MOORING_AGENT_RUN"


class ExecStream:
    """A ContainerStream of a command."""

    def __init__(
        self,
        engine: EngineApi,
        exec_id: str,
        container_id: str,
        connection: EngineConnection,
        output: ContainerOutput,
        *,
        tty: bool,
    ) -> None:
        self._engine, self._exec_id, self._container_id = engine, exec_id, container_id
        self._connection, self._output, self._tty = connection, output, tty
        self._has_ended = False

    async def read(self) -> tuple[Channel, bytes] | None:
        return await self._output.read()

    async def write(self, data: bytes) -> None:
        await self._connection.write(data)

    async def end_input(self) -> None:
        # The engine would also end the output of a terminal, while the command still runs.
        if not self._tty:
            self._connection.end_input()

    async def resize(self, window: WindowSize) -> None:
        # A command that has just ended cannot be resized.
        with suppress(EngineRefused):
            await self._engine.request(
                "POST", f"/exec/{self._exec_id}/resize", params=_size_parameters(window)
            )

    async def signal(self, name: str) -> None:
        number = processes.NUMBERS.get(name)
        if number is not None and (pid := await self._pid()) is not None:
            processes.signal_group(pid, number, self._container_id)

    async def status(self) -> StreamStatus:
        until = time.monotonic() + _RECORDED_WITHIN_S
        while time.monotonic() < until:
            state = await self._state()
            if state is None:
                self._has_ended = True
                return StreamStatus.of_error("not_running", "the container of the instance was removed")
            if state["ExitCode"] is not None and not state["Running"]:
                self._has_ended = True
                return StreamStatus(exit_code=int(state["ExitCode"]), truncated=self._output.truncated)
            await asyncio.sleep(_POLL_S)
        # An engine that shuts down ends the stream while the command still runs.
        raise RuntimeUnavailable("the engine ended the output of a command that has not ended")

    async def close(self) -> None:
        """The engine has no call to end a command, but reports the pid on the host."""
        try:
            if not self._has_ended and (pid := await self._pid()) is not None:
                await asyncio.to_thread(processes.kill_tree, pid, self._container_id)
        finally:
            self._connection.abort()

    async def _pid(self) -> int | None:
        """Wait until the engine has recorded the command's pid. Return it; None if the command has ended.

        Raises:
            RuntimeUnavailable: the engine does not report it.
        """
        until = time.monotonic() + _RECORDED_WITHIN_S
        while (state := await self._state()) is not None and state["Running"]:
            if state["Pid"]:
                return int(state["Pid"])
            if time.monotonic() > until:
                raise RuntimeUnavailable("the engine reports no process for a running command")
            await asyncio.sleep(_POLL_S)
        return None

    async def _state(self) -> Document | None:
        """What the engine knows of the command; None: it was removed with its container."""
        try:
            return await self._engine.request("GET", f"/exec/{self._exec_id}/json")
        except EngineRefused as refused:
            if refused.status != 404:
                raise
            return None


async def open_exec(
    engine: EngineApi, shells: ContainerShells, container_id: str, request: ExecRequest, run_id: str
) -> ExecStream:
    """Start the command, with `run_id` as its RUN_VARIABLE.

    Raises:
        StreamRefused: the container does not run, rejects the user or the folder of the request, or lacks the
            shell that it needs.
        RuntimeUnavailable: the engine does not answer.
    """
    if request.working_dir and is_kernel_path(normal_path(request.working_dir)):
        raise StreamRefused("exec_rejected", "working_dir must not be in /proc, /sys or /dev; choose another")
    try:
        config = _config(request, await _command(shells, container_id, request), run_id)
        created = await engine.request("POST", f"/containers/{container_id}/exec", body=config)
        exec_id = str(created["Id"])
        body: Document = {"Tty": request.tty, "Detach": False, **_console(request)}
        connection = await engine.open("POST", f"/exec/{exec_id}/start", body=body, upgrade=True)
    except EngineRefused as refused:
        raise _refused(refused) from refused
    output = ContainerOutput(connection, is_raw=request.tty, max_bytes=request.max_output_bytes)
    stream = ExecStream(engine, exec_id, container_id, connection, output, tty=request.tty)
    if request.window is not None and request.tty:
        # Engines before 1.42 ignore the size in the request.
        await stream.resize(request.window)
    return stream


def _refused(refused: EngineRefused) -> Exception:
    if refused.status in {404, 409}:
        return StreamRefused("not_running", "the instance is not running; start it first")
    if refused.status == 400:
        return StreamRefused("exec_rejected", f"the container rejects this command: {refused.message[:300]}")
    return refused


async def _command(shells: ContainerShells, container_id: str, request: ExecRequest) -> list[str]:
    if not request.login_shell and not request.any_shell:
        return request.command
    shell = await shells.shell_of(container_id)
    return in_login_shell(request.command, shell) if request.login_shell else [shell, *request.command[1:]]


def _config(request: ExecRequest, command: list[str], run_id: str) -> Document:
    return {
        "AttachStdin": request.stdin,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": request.tty,
        "Cmd": command,
        "Env": [f"{name}={value}" for name, value in {**request.env, RUN_VARIABLE: run_id}.items()],
        "User": request.user or "",
        "WorkingDir": request.working_dir or "",
        **_console(request),
    }


def _console(request: ExecRequest) -> Document:
    if request.window is None or not request.tty:
        return {}
    return {"ConsoleSize": [request.window.height, request.window.width]}


def _size_parameters(window: WindowSize) -> dict[str, str]:
    return {"h": str(window.height), "w": str(window.width)}
