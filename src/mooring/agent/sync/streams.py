"""Logs and exec: reads from the engine and uploads to the control plane replica that requested it.

engine --iterator--> reader's thread --queue--> uploader's thread --NDJSON--> control plane
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from cachetools import FIFOCache

from mooring.agent.decide.reconcile import is_live
from mooring.agent.decide.snapshot import Key
from mooring.agent.runtime import Container, Runtime, RuntimeUnavailable
from mooring.agent.sync.client import ControlPlaneClient, ControlPlaneError
from mooring.agent.sync.workers import Workers
from mooring.schemas.agent_streams import StreamFrame, StreamRequest

HEARTBEAT_S: Final = 5.0
MAX_IDS: Final = 4096
MAX_QUEUED_FRAMES: Final = 256  # a full queue slows the engine, and with it the container

ContainerOf = Callable[[Key], Container | None]

log = logging.getLogger(__name__)


class Streams:
    """Serves each request once, however often answers repeat it.

    A stream occupies one of its project's threads until the stream ends, even if its user reads slowly.
    """

    def __init__(
        self,
        runtime: Runtime,
        control_plane: ControlPlaneClient,
        container_of: ContainerOf,
        workers: Workers,
        heartbeat_s: float = HEARTBEAT_S,
        node: str = "",
    ) -> None:
        self._node = node
        self._runtime, self._control_plane = runtime, control_plane
        self._container_of, self._workers = container_of, workers
        self._heartbeat_s = heartbeat_s
        self._begun: FIFOCache[str, None] = FIFOCache(MAX_IDS)
        self._lock = threading.Lock()

    def serve(self, requests: Iterable[StreamRequest]) -> None:
        for request in requests:
            if self._is_new(request.id) and not self._submit(request):
                # The user gets an error because the node does not connect, and may retry.
                log.warning("stream %s rejected: its project has too many open on this node", request.id)

    def _submit(self, request: StreamRequest) -> bool:
        container = self._container_of((request.instance_id, request.attempt))
        project = container.owner if container else request.instance_id
        owner = f"{self._node}/{project}"
        return self._workers.submit(partial(self._run, request), owner) is not None

    def _is_new(self, stream_id: str) -> bool:
        with self._lock:
            is_new = stream_id not in self._begun
            self._begun[stream_id] = None
        return is_new

    def _run(self, request: StreamRequest) -> None:
        pipe = _Pipe(self._heartbeat_s)
        threading.Thread(
            target=pipe.fill, args=[partial(self._frames, request)], name=f"read-{request.id}", daemon=True
        ).start()
        try:
            self._control_plane.upload(request.id, request.url, iter(pipe))
        except ControlPlaneError as error:
            # The usual end of a followed log: the user has disconnected.
            log.info("stream %s ended: %s", request.id, error)
        finally:
            pipe.close()

    def _frames(self, request: StreamRequest) -> Iterator[StreamFrame]:
        container = self._container_of((request.instance_id, request.attempt))
        if container is None or (request.exec is not None and not is_live(container)):
            return iter(
                [StreamFrame.of_error("not_running", "The instance has no running container on its node")]
            )
        if request.exec is not None:
            return self._runtime.exec(container.container_id, request.exec)
        if request.logs is not None:
            return self._runtime.logs(container.container_id, request.logs)
        return iter(
            [StreamFrame.of_error("not_supported", "This node's agent is too old for this type of stream")]
        )


class _Pipe:
    """A queue from the thread that reads the engine to the thread that uploads; either may end first."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._frames: queue.Queue[StreamFrame | None] = queue.Queue(MAX_QUEUED_FRAMES)
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[StreamFrame]:
        """Frames as they arrive, or else an empty one at times: only a write detects a lost connection."""
        while True:
            try:
                frame = self._frames.get(timeout=self._heartbeat_s)
            except queue.Empty:
                yield StreamFrame()
                continue
            if frame is None:
                return
            yield frame
            if frame.is_last:
                return

    def fill(self, open_frames: Callable[[], Iterator[StreamFrame]]) -> None:
        try:
            self._pump(open_frames())
        except RuntimeUnavailable as error:
            log.warning("a stream failed: %s", error)
            self._put(
                StreamFrame.of_error("docker_unavailable", "The node's container engine does not answer")
            )
        except Exception:
            log.exception("a stream failed")
            self._put(StreamFrame.of_error("internal_error", "The node's agent failed; see its log"))
        finally:
            self._put(None)

    def close(self) -> None:
        self._closed.set()

    def _pump(self, frames: Iterator[StreamFrame]) -> None:
        """Ends soon after the pipe is closed: a `Runtime` yields at least every 10 s."""
        try:
            for frame in frames:
                if not self._put(frame):
                    break
        finally:
            if close := getattr(frames, "close", None):
                close()

    def _put(self, frame: StreamFrame | None) -> bool:
        """Queue a frame. Returns False if the pipe was closed."""
        while not self._closed.is_set():
            try:
                self._frames.put(frame, timeout=1)
            except queue.Full:
                continue
            return True
        return False
