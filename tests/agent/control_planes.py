"""A minimal control plane that serves `/agent/v1` over real HTTP."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from pydantic import BaseModel, SecretStr

from mooring.schemas.agent import (
    Assignment,
    Heartbeat,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    ObservedInstance,
    OverlayNetwork,
    Removal,
    SessionAnswer,
    StartSecrets,
    StartSecretsRequest,
    SyncAnswer,
    SyncRequest,
)
from mooring.schemas.agent_streams import StreamRequest, StreamRequests, StreamRequestsQuery
from tests.agent.stream_receivers import StreamReceiver, stream_receiver

# With the id of a node after it, answers are for that node.
CREDENTIAL = "node-credential-canary"
TOKEN = "join-token"
# What a node offers at its join. This control plane answers with its own, as an earlier release does.
OWN = SecretStr("own-credential")


@dataclass
class TinyControlPlane:
    """Holds the desired state to answer with, and the reports received."""

    control_plane_id: str = "cpl_tests"
    generation: int = 1
    report_interval_s: float = 0.2
    self_fence_s: float | None = None
    assignments: list[Assignment] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    streams: list[StreamRequest] = field(default_factory=list)
    overlays: list[OverlayNetwork] = field(default_factory=list)
    secrets: StartSecrets | None = None  # None: answered 404
    secrets_requests: list[tuple[str, StartSecretsRequest]] = field(default_factory=list)
    failure: tuple[int, str] | None = None  # while set: the status and code of every answer
    reports: list[tuple[float, SyncRequest]] = field(default_factory=list)
    receiver: StreamReceiver = field(default_factory=StreamReceiver)
    sessions: int = 0
    calls: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    url: str = ""
    shutting_down: bool = False
    node_id: str = "nod_1"  # in answers to reports and for new sessions
    streams_node_id: str = "nod_1"
    stream_calls: int = 0
    earlier_release: bool = False  # requests streams in answers to reports only
    revision: int | None = None  # None: no heartbeats, as in an earlier release
    heartbeats: list[Heartbeat] = field(default_factory=list)
    heartbeat_node_id: str = "nod_1"
    heartbeat_status: int = 200
    failed_heartbeats: int = 0  # answered with another status

    def wants(
        self,
        *assignments: Assignment,
        removals: tuple[Removal, ...] = (),
        generation: int | None = None,
    ) -> None:
        """Set the desired state of the node, under the next generation by default."""
        with self.changed:
            self.assignments, self.removals = list(assignments), list(removals)
            self.generation = self.generation + 1 if generation is None else generation
            self.changed.notify_all()

    def request_streams(self, *streams: StreamRequest) -> None:
        with self.changed:
            self.streams.extend(each.model_copy(update={"url": self.receiver.url}) for each in streams)
            self.changed.notify_all()

    def shut_down(self) -> None:
        """Answer every waiting call; later calls are answered without waiting."""
        with self.changed:
            self.shutting_down = True
            self.changed.notify_all()

    def last(self) -> SyncRequest | None:
        with self.changed:
            return self.reports[-1][1] if self.reports else None

    def instances(self) -> dict[tuple[str, int], ObservedInstance]:
        """The instances of the newest report, by id and attempt; empty if they are unknown."""
        report = self.last()
        found = (report.instances if report else None) or []
        return {(one.instance_id, one.attempt): one for one in found}

    def phase(self, assignment: Assignment) -> str | None:
        seen = self.instances().get((assignment.instance_id, assignment.attempt))
        return seen.phase if seen else None

    def reason_code(self, assignment: Assignment) -> str | None:
        seen = self.instances().get((assignment.instance_id, assignment.attempt))
        return seen.reason.code if seen and seen.reason else None

    def sync(self, request: SyncRequest) -> SyncAnswer:
        until = time.monotonic() + request.wait_s
        with self.changed:
            self.reports.append((time.monotonic(), request))
            self.changed.notify_all()
            while self._nothing_new(request) and (left_s := until - time.monotonic()) > 0:
                self.changed.wait(left_s)
            answer = SyncAnswer(
                control_plane_id=self.control_plane_id,
                node_id=self.node_id,
                generation=self.generation,
                report_interval_s=self.report_interval_s,
                self_fence_s=self.self_fence_s,
                revision=self.revision,
            )
            if request.brief and request.generation == self.generation:
                return answer.model_copy(update={"brief": True})
            desired = {
                "assignments": self.assignments,
                "removals": self.removals,
                "overlays": self.overlays,
                "streams": self._waiting_streams() if self.earlier_release else [],
            }
            return answer.model_copy(update=desired)

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        until = time.monotonic() + heartbeat.wait_s
        with self.changed:
            self.heartbeats.append(heartbeat)
            self.changed.notify_all()
            while self._is_current(heartbeat) and not self.shutting_down:
                if (left_s := until - time.monotonic()) <= 0:
                    break
                self.changed.wait(left_s)
            return HeartbeatAnswer(
                control_plane_id=self.control_plane_id,
                node_id=self.heartbeat_node_id,
                report_interval_s=self.report_interval_s,
                self_fence_s=self.self_fence_s,
                report_wanted=not self._is_current(heartbeat),
            )

    def _is_current(self, heartbeat: Heartbeat) -> bool:
        return (heartbeat.generation, heartbeat.revision) == (self.generation, self.revision)

    def stream_requests(self, query: StreamRequestsQuery) -> StreamRequests:
        until = time.monotonic() + query.wait_s
        with self.changed:
            while self._knows_all_streams(query) and (left_s := until - time.monotonic()) > 0:
                self.changed.wait(left_s)
            self.stream_calls += 1
            return StreamRequests(
                control_plane_id=self.control_plane_id,
                node_id=self.streams_node_id,
                streams=self._waiting_streams(),
            )

    def _waiting_streams(self) -> list[StreamRequest]:
        return [each for each in self.streams if each.id not in self.receiver]

    def _knows_all_streams(self, query: StreamRequestsQuery) -> bool:
        return not self.shutting_down and {each.id for each in self._waiting_streams()} <= set(query.known)

    def _nothing_new(self, request: SyncRequest) -> bool:
        streams = self.earlier_release and self._waiting_streams()
        return request.generation == self.generation and not streams and not self.shutting_down


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        plane = cast(_Server, self.server).plane
        plane.calls += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if plane.failure is not None:
            status, code = plane.failure
            self._answer(status, f'{{"code": "{code}"}}'.encode())
        elif self.path == "/agent/v1/join":
            self._join(plane, JoinRequest.model_validate_json(body))
        elif not (self.headers["Authorization"] or "").startswith(f"Bearer {CREDENTIAL}"):
            self._answer(401, b'{"code": "unauthorized"}')
        elif self.path == "/agent/v1/session":
            plane.sessions += 1
            opened = SessionAnswer(
                session=plane.sessions, control_plane_id=plane.control_plane_id, node_id=plane.node_id
            )
            self._model(opened)
        elif self.path.endswith("/start-secrets"):
            plane.secrets_requests.append((self.path, StartSecretsRequest.model_validate_json(body)))
            if plane.secrets is None:
                self._answer(404, b'{"code": "not_found"}')
            else:
                self._model(plane.secrets)
        elif self.path == "/agent/v1/stream-requests":
            if plane.earlier_release:
                self._answer(404, b'{"code": "not_found"}')
            else:
                self._model(plane.stream_requests(StreamRequestsQuery.model_validate_json(body)))
        elif self.path == "/agent/v1/heartbeat" and plane.heartbeat_status != 200:
            plane.failed_heartbeats += 1
            self._answer(plane.heartbeat_status, b'{"code": "not_found"}')
        elif self.path == "/agent/v1/heartbeat":
            self._model(plane.heartbeat(Heartbeat.model_validate_json(body)))
        else:
            self._model(plane.sync(SyncRequest.model_validate_json(body)))

    def _join(self, plane: TinyControlPlane, request: JoinRequest) -> None:
        if request.token != TOKEN:
            self._answer(401, b'{"code": "unauthorized"}')
            return
        self._model(
            JoinAnswer(
                node_id="nod_1",
                node_name=request.node_name or "unnamed",
                credential=CREDENTIAL,
                control_plane_id=plane.control_plane_id,
            )
        )

    def _model(self, answer: BaseModel) -> None:
        if node_id := (self.headers["Authorization"] or "").removeprefix(f"Bearer {CREDENTIAL}"):
            answer = answer.model_copy(update={"node_id": node_id})
        self._answer(200, answer.model_dump_json().encode())

    def _answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the agent has ended

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    plane: TinyControlPlane


@contextmanager
def control_plane(port: int = 0, **fields: Any) -> Iterator[TinyControlPlane]:
    with stream_receiver() as receiver, _Server(("127.0.0.1", port), _Handler) as server:
        server.plane = TinyControlPlane(receiver=receiver, **fields)
        server.plane.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.plane
        finally:
            server.plane.shut_down()
            server.shutdown()
            thread.join()
