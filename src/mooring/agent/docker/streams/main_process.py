"""Attaches to the main process of a container.

The agent connects before it starts the container, so that a client gets the output from the first byte on.
Nobody reads them until a client comes: the engine buffers 1 MiB, then the process waits for its reader.
The input has a connection of its own, because the process reads the end of its input when that connection
ends: it stays open when a client disconnects. If the agent ends, the input ends, but not that of a terminal.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams.container_output import ContainerOutput
from mooring.agent.docker.streams.engine_streams import EngineApi, HeldConnection
from mooring.agent.runtime import ContainerStream, RuntimeUnavailable, StreamRefused
from mooring.schemas.agent_streams import SIGNALS, AttachRequest, StreamStatus, WindowSize
from mooring_client.stream_messages import Channel

HELD_S: Final = 30.0
_ENDED_WITHIN_S: Final = 2.0
_POLL_S: Final = 0.01
_OUTPUT: Final[Mapping[str, str]] = {"stream": "1", "stdout": "1", "stderr": "1"}
_INPUT: Final[Mapping[str, str]] = {"stream": "1", "stdin": "1"}

log = logging.getLogger(__name__)


class InputConnection(Protocol):
    """Where the input of a client goes."""

    async def write(self, data: bytes) -> None: ...

    def end_input(self) -> None: ...


class HeldConnections:
    """The connections that were opened before a start. Any thread may call."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._outputs: dict[str, HeldConnection] = {}  # by container id
        self._inputs: dict[str, HeldConnection] = {}

    def hold(self, container_id: str, *, stdin: bool) -> None:
        """Connect to a container that is about to start. Without the connections, attaching begins late."""
        path = f"/containers/{container_id}/attach"
        try:
            output = self._engine.hold(path, _OUTPUT)
            given = self._engine.hold(path, _INPUT) if stdin else None
        except (EngineRefused, RuntimeUnavailable) as error:
            log.warning("cannot attach to container %s before its start: %s", container_id, error)
            return
        with self._lock:
            if output is not None:
                self._outputs[container_id] = output
            if given is not None:
                self._inputs[container_id] = given
        self._drop_ended(container_id)
        if output is not None:
            timer = threading.Timer(HELD_S, self._drop, (container_id, output))
            timer.daemon = True
            timer.start()

    def take_output(self, container_id: str) -> HeldConnection | None:
        """The output from the start on, for the first that asks."""
        with self._lock:
            return self._outputs.pop(container_id, None)

    def input_of(self, container_id: str) -> HeldConnection | None:
        with self._lock:
            return self._inputs.get(container_id)

    def _drop(self, container_id: str, output: HeldConnection) -> None:
        """No client came: the process must not wait for one."""
        with self._lock:
            if self._outputs.get(container_id) is not output:
                return
            del self._outputs[container_id]
        output.abort()

    def _drop_ended(self, except_id: str) -> None:
        """Close the inputs of containers that have ended: the engine has closed its side."""
        with self._lock:
            ended = [key for key, held in self._inputs.items() if key != except_id and held.has_ended()]
            dropped = [self._inputs.pop(key) for key in ended]
        for each in dropped:
            each.abort()


class NoStream:
    """A ContainerStream that has ended."""

    async def read(self) -> tuple[Channel, bytes] | None:
        return None

    async def write(self, data: bytes) -> None: ...

    async def end_input(self) -> None: ...

    async def resize(self, window: WindowSize) -> None: ...

    async def signal(self, name: str) -> None: ...

    async def status(self) -> StreamStatus:
        return StreamStatus()

    async def close(self) -> None: ...


class AttachedStream:
    """A ContainerStream of the main process. To close it does not end the process."""

    def __init__(
        self, engine: EngineApi, container_id: str, output: ContainerOutput, given: InputConnection | None,
        *, tty: bool,
    ) -> None:  # fmt: skip
        self._engine, self._path = engine, f"/containers/{container_id}"
        self._output, self._input, self._tty = output, given, tty

    async def read(self) -> tuple[Channel, bytes] | None:
        return await self._output.read()

    async def write(self, data: bytes) -> None:
        if self._input is not None:
            await self._input.write(data)

    async def end_input(self) -> None:
        # The engine would also end the output of a terminal, while the process still runs.
        if self._input is not None and not self._tty:
            self._input.end_input()

    async def resize(self, window: WindowSize) -> None:
        with suppress(EngineRefused):  # a process that has just ended cannot be resized
            size = {"h": str(window.height), "w": str(window.width)}
            await self._engine.request("POST", f"{self._path}/resize", params=size)

    async def signal(self, name: str) -> None:
        if name in SIGNALS:
            with suppress(EngineRefused):
                await self._engine.request("POST", f"{self._path}/kill", params={"signal": f"SIG{name}"})

    async def status(self) -> StreamStatus:
        until = time.monotonic() + _ENDED_WITHIN_S
        while time.monotonic() < until:
            try:
                state = (await self._engine.request("GET", f"{self._path}/json"))["State"]
            except EngineRefused as refused:
                if refused.status != 404:
                    raise
                return StreamStatus.of_error("not_running", "the container of the instance was removed")
            if not state["Running"]:
                return StreamStatus(exit_code=int(state["ExitCode"]))
            await asyncio.sleep(_POLL_S)
        # An engine that shuts down ends the stream while the process still runs.
        raise RuntimeUnavailable("the engine ended the output of a container that has not ended")

    async def close(self) -> None:
        self._output.connection.abort()


async def open_attached(
    engine: EngineApi, held: HeldConnections, container_id: str, request: AttachRequest
) -> ContainerStream:
    """Attach, or send a signal.

    Raises:
        StreamRefused: the container does not run, and nobody waits for what it has written.
        RuntimeUnavailable: the engine does not answer.
    """
    path = f"/containers/{container_id}"
    try:
        if request.signal is not None:
            await engine.request("POST", f"{path}/kill", params={"signal": f"SIG{request.signal}"})
            return NoStream()
        inspected = await engine.request("GET", f"{path}/json")
        tty, has_input = bool(inspected["Config"]["Tty"]), bool(inspected["Config"]["OpenStdin"])
        connection = held.take_output(container_id)
        given: InputConnection | None = held.input_of(container_id)
        if connection is None and not inspected["State"]["Running"]:
            raise StreamRefused("not_running", "the instance is not running; its log has its output")
        if connection is not None:
            output = ContainerOutput(connection, is_raw=tty)
        else:
            # Without a held input, as after a restart of the agent, only a terminal may have one.
            both = {**_OUTPUT, **(_INPUT if given is None and has_input and tty else {})}
            opened = await engine.open("POST", f"{path}/attach", params=both, upgrade=True)
            output = ContainerOutput(opened, is_raw=tty)
            given = given or (opened if both.keys() >= _INPUT.keys() else None)
    except EngineRefused as refused:
        if refused.status in {404, 409}:
            raise StreamRefused("not_running", "the instance is not running; start it first") from refused
        if refused.status == 400 and request.signal is not None:
            raise StreamRefused("exec_rejected", f"there is no signal {request.signal}") from refused
        raise
    stream = AttachedStream(engine, container_id, output, given if request.stdin else None, tty=tty)
    if request.window is not None and tty:
        await stream.resize(request.window)
    return stream
