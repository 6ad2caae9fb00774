"""Serves the streams that users wait for: logs, commands and connections to ports.

container <──ContainerStream──> `StreamSession` <──WebSocket──> the process that requested the stream
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from cachetools import FIFOCache
from websockets.exceptions import WebSocketException

from mooring.agent.decide.reconcile import is_live
from mooring.agent.decide.snapshot import Key
from mooring.agent.runtime import Container, ContainerStream, Runtime, RuntimeUnavailable, StreamRefused
from mooring.agent.streams.loop import StreamLoop
from mooring.agent.streams.session import KEEPALIVE_EVERY_S, StreamSession
from mooring.agent.sync.client import ControlPlaneClient, InsecureUrl
from mooring.schemas.agent_streams import StreamRequest, StreamStatus
from mooring_client.stream_messages import Channel, message

MAX_IDS: Final = 4096
# Of one project on one node. A stream uses no thread.
STREAMS_OF_PROJECT: Final = 512
CLOSED_WITHIN_S: Final = 3.0

ContainerOf = Callable[[Key], Container | None]

log = logging.getLogger(__name__)


class Streams:
    """Serves each request once, however often answers repeat it. Any thread may call."""

    def __init__(
        self,
        runtime: Runtime,
        control_plane: ControlPlaneClient,
        container_of: ContainerOf,
        loop: StreamLoop,
        *,
        of_project: int = STREAMS_OF_PROJECT,
        keepalive_every_s: float = KEEPALIVE_EVERY_S,
    ) -> None:
        self._runtime, self._control_plane, self._container_of = runtime, control_plane, container_of
        self._loop, self._of_project, self._keepalive_every_s = loop, of_project, keepalive_every_s
        self._lock = threading.Condition()  # of everything below
        self._begun: FIFOCache[str, None] = FIFOCache(MAX_IDS)
        self._open: Counter[str] = Counter()  # by project
        self._cancels: dict[str, Callable[[], None]] = {}

    def serve(self, requests: Iterable[StreamRequest]) -> None:
        for request in requests:
            container = self._container_of((request.instance_id, request.attempt))
            project = container.owner if container else request.instance_id
            if self._admit(request, project):
                with self._lock:  # `_ended` then removes the entry after it was added
                    self._cancels[request.id] = self._loop.begin(partial(self._run, request, project))

    def end_left_commands(self, containers: Iterable[Container]) -> None:
        """Kill, in the background, what an earlier agent process has left: its users are gone."""
        running = [each.container_id for each in containers if is_live(each)]
        if running:
            self._loop.begin(partial(self._end_left_commands, running))

    async def _end_left_commands(self, container_ids: list[str]) -> None:
        for container_id in container_ids:
            try:
                await self._runtime.end_left_commands(container_id)
            except RuntimeUnavailable as error:
                log.warning("commands of an earlier agent process may be left: %s", error)

    def close(self) -> None:
        """End all streams, because the agent ends. Waits until the commands that they started are killed."""
        with self._lock:
            cancels = list(self._cancels.values())
        for cancel in cancels:
            cancel()
        with self._lock:
            self._lock.wait_for(lambda: not self._open, CLOSED_WITHIN_S)

    def _admit(self, request: StreamRequest, project: str) -> bool:
        with self._lock:
            if request.id in self._begun:
                return False
            self._begun[request.id] = None
            if self._open[project] >= self._of_project:
                # The user gets an error because the node does not connect, and may retry.
                log.warning("stream %s rejected: its project has too many open on this node", request.id)
                return False
            self._open[project] += 1
            return True

    async def _run(self, request: StreamRequest, project: str) -> None:
        try:
            async with self._control_plane.stream_connection(request.id, request.url) as socket:
                opened = await self._opened_or_closed(request)
                if isinstance(opened, StreamStatus):
                    await socket.send(message(Channel.STATUS, opened.model_dump_json().encode()))
                    return
                timeout_s = request.exec.timeout_s if request.exec is not None else 0
                await StreamSession(socket, opened, timeout_s, self._keepalive_every_s).run()
        except (OSError, TimeoutError, WebSocketException, InsecureUrl) as error:
            log.info("stream %s ended: %s", request.id, error)
        finally:
            self._ended(request.id, project)

    def _ended(self, stream_id: str, project: str) -> None:
        with self._lock:
            self._cancels.pop(stream_id, None)
            self._open[project] -= 1
            if not self._open[project]:
                del self._open[project]
            self._lock.notify_all()

    async def _opened_or_closed(self, request: StreamRequest) -> ContainerStream | StreamStatus:
        """As `_opened`. If this task is cancelled meanwhile, a stream that was opened is closed."""
        opening = asyncio.ensure_future(self._opened(request))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opened = await opening
            if not isinstance(opened, StreamStatus):
                await opened.close()
            raise

    async def _opened(self, request: StreamRequest) -> ContainerStream | StreamStatus:
        """The stream, or why there is none."""
        try:
            return await self._open_stream(request)
        except StreamRefused as refused:
            return refused.status
        except RuntimeUnavailable as error:
            log.warning("stream %s cannot be opened: %s", request.id, error)
            return StreamStatus.of_error("docker_unavailable", "The node's container engine does not answer")
        except Exception:
            log.exception("stream %s cannot be opened", request.id)
            return StreamStatus.of_error("internal_error", "The node's agent failed; see its log")

    async def _open_stream(self, request: StreamRequest) -> ContainerStream:
        container = self._container_of((request.instance_id, request.attempt))
        reads_ended = request.logs is not None or request.attach is not None
        if container is None or not (reads_ended or is_live(container)):
            raise StreamRefused("not_running", "The instance has no running container on its node")
        if request.exec is not None:
            return await self._runtime.exec(container.container_id, request.exec)
        if request.logs is not None:
            return await self._runtime.logs(container.container_id, request.logs)
        if request.dial is not None:
            return await self._runtime.dial(container.container_id, request.dial)
        if request.attach is not None:
            return await self._runtime.attach(container.container_id, request.attach)
        raise StreamRefused("not_supported", "This node's agent is too old for this type of stream")
