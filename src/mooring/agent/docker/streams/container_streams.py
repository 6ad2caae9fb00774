"""The streams of a Docker container, and the end of commands that an earlier agent process has left."""

import logging
from secrets import token_hex

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.docker.streams import dial, exec, logs, main_process, processes  # noqa: A004 - the module of commands
from mooring.agent.docker.streams.engine_streams import Document, EngineApi
from mooring.agent.docker.streams.login_shell import ContainerShells
from mooring.agent.runtime import ContainerStream
from mooring.schemas.agent_streams import AttachRequest, DialRequest, ExecRequest, LogsRequest

log = logging.getLogger(__name__)


class DockerStreams:
    """The part of a `Runtime` that opens streams."""

    def __init__(self, engine: EngineApi) -> None:
        self._streams = engine
        self._shells = ContainerShells(engine)
        self._run_id = token_hex(8)
        self._held = main_process.HeldConnections(engine)

    async def logs(self, container_id: str, request: LogsRequest) -> ContainerStream:
        return await logs.open_logs(self._streams, container_id, request)

    async def exec(self, container_id: str, request: ExecRequest) -> ContainerStream:
        return await exec.open_exec(self._streams, self._shells, container_id, request, self._run_id)

    async def dial(self, container_id: str, request: DialRequest) -> ContainerStream:
        return await dial.open_port(self._streams, container_id, request)

    async def attach(self, container_id: str, request: AttachRequest) -> ContainerStream:
        return await main_process.open_attached(self._streams, self._held, container_id, request)

    async def end_left_commands(self, container_id: str) -> None:
        try:
            container = await self._streams.request("GET", f"/containers/{container_id}/json")
            for exec_id in container["ExecIDs"] or ():
                self._end_if_left(await self._streams.request("GET", f"/exec/{exec_id}/json"), container_id)
        except EngineRefused as refused:
            if refused.status != 404:  # the container or the command has ended
                raise

    def _end_if_left(self, command: Document, container_id: str) -> None:
        pid = int(command["Pid"] or 0)
        if not command["Running"] or not pid or not processes.is_in(pid, container_id):
            return
        run = processes.environment_of(pid).get(exec.RUN_VARIABLE)
        if run not in {None, self._run_id}:
            log.warning("killing process %s, which an earlier agent process left in a container", pid)
            processes.kill_tree(pid, container_id)
