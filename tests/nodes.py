"""Nodes for tests of the control plane: `WireNode` sends the test's reports, `SimulatedNode` is an agent."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from mooring.agent.gpus.telemetry import Machine
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync.agent import Agent
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.identity import NodeIdentity, StateDirectory
from mooring.agent.sync.specs import Specs
from mooring.core.gpu import GpuFacts
from mooring.core.node import NodeFacts
from mooring.schemas.agent import (
    Assignment,
    HeartbeatAnswer,
    JoinAnswer,
    ObservedInstance,
    SessionAnswer,
    StartSecrets,
    SyncAnswer,
    SyncRequest,
)
from mooring.schemas.agent_streams import StreamError, StreamRequest, StreamRequests, StreamStatus
from mooring_client.stream_messages import SUBPROTOCOL, Channel, message
from tests.service import Client


def join_token(client: Client, **fields: Any) -> str:
    answer = client.post("/v1/join-tokens", json=fields)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


class WireNode:
    """Speaks the agent's protocol but does nothing by itself: each `sync` sends one report."""

    def __init__(
        self, admin: Client, name: str, *, gpus: int = 8, model: str = "NVIDIA H100 80GB HBM3"
    ) -> None:
        self.name = name
        self.http = httpx.Client(base_url=admin.base_url, timeout=70, verify=False)
        joined = self.http.post(
            "/agent/v1/join", json={"token": join_token(admin), "node_name": name, "hostname": name}
        )
        assert joined.status_code == 201, joined.text
        self.identity = JoinAnswer.model_validate(joined.json())
        self.http.headers["Authorization"] = f"Bearer {self.identity.credential}"
        self.facts = NodeFacts(
            hostname=name, address="127.0.0.1", cpus=64, memory_mib=524_288, labels={"zone": "a"},
            agent_version="0.1.0", docker_version="20.10.24", grants=True, asks_for_secrets=True,
            asks_for_streams=True, mounts_volumes=True,
        )  # fmt: skip
        self.gpus = [
            GpuFacts(
                uuid=f"GPU-{name}-{index}", index=index, model=model, memory_mib=81_559, mig_mode="disabled"
            )
            for index in range(gpus)
        ]
        self.generation = 0
        self.seq = 0
        self.session = 0
        self.open_session()

    @property
    def id(self) -> str:
        return self.identity.node_id

    def open_session(self) -> None:
        answer = self.http.post("/agent/v1/session")
        assert answer.status_code == 200, answer.text
        self.session = SessionAnswer.model_validate(answer.json()).session
        self.generation = self.seq = 0
        self.revision: int | None = None
        self.specs = Specs()

    def report(self, *instances: ObservedInstance, **fields: Any) -> SyncRequest:
        """Create the next report, with exactly these instances (`instances=None`: unknown)."""
        self.seq += 1
        return SyncRequest.model_validate(
            {
                "session": self.session, "seq": self.seq, "generation": self.generation, "facts": self.facts,
                "gpus": self.gpus, "instances": list(instances), "specs": self.specs.known(), **fields,
            }
        )  # fmt: skip

    def post_sync(self, *instances: ObservedInstance, **fields: Any) -> httpx.Response:
        """Send the next report."""
        return self.http.post(
            "/agent/v1/sync",
            content=self.report(*instances, **fields).model_dump_json(),
            headers={"Content-Type": "application/json"},
        )

    def sync(self, *instances: ObservedInstance, **fields: Any) -> SyncAnswer:
        """Send the next report; store and return the answer."""
        answer = self.post_sync(*instances, **fields)
        assert answer.status_code == 200, answer.text
        completed = self.specs.complete(SyncAnswer.model_validate_json(answer.content))
        assert completed is not None, "the answer leaves out a spec that the report did not name"
        self.specs.keep(completed)
        self.generation, self.revision = completed.generation, completed.revision
        return completed

    def post_heartbeat(self, **fields: Any) -> httpx.Response:
        """Send a heartbeat that refers to the last report."""
        body = {
            "session": self.session, "seq": self.seq, "generation": self.generation,
            "revision": self.revision, **fields,
        }  # fmt: skip
        return self.http.post("/agent/v1/heartbeat", json=body)

    def heartbeat(self, **fields: Any) -> bool:
        """Send a heartbeat; returns whether it was stored, so that no report is wanted."""
        answer = self.post_heartbeat(**fields)
        assert answer.status_code == 200, answer.text
        return not HeartbeatAnswer.model_validate_json(answer.content).report_wanted

    def post_stream_requests(self, **fields: Any) -> httpx.Response:
        """Send a request for the streams that users wait for."""
        return self.http.post("/agent/v1/stream-requests", json={"session": self.session, **fields})

    def stream_requests(self, **fields: Any) -> list[StreamRequest]:
        """The streams that users wait for."""
        answer = self.post_stream_requests(**fields)
        assert answer.status_code == 200, answer.text
        return StreamRequests.model_validate_json(answer.content).streams

    def connect(self, stream_id: str) -> ClientConnection:
        """Open the WebSocket of a stream. Raises InvalidStatus: the replica rejects it."""
        base = self.http.base_url
        return websocket(
            f"{'wss' if base.scheme == 'https' else 'ws'}://{base.netloc.decode()}/agent/v1/streams/{stream_id}",
            self.http.headers["Authorization"],
            SUBPROTOCOL,
        )

    def bring(self, stream_id: str, *messages: bytes) -> None:
        """Serve a stream with these messages, and wait until the replica has read them."""
        with self.connect(stream_id) as stream:
            for each in messages:
                stream.send(each)

    def post_start_secrets(self, assignment: Assignment, **fields: Any) -> httpx.Response:
        """Send a request for the secrets and registry credentials of this attempt."""
        body = {"session": self.session, "attempt": assignment.attempt, **fields}
        return self.http.post(f"/agent/v1/instances/{assignment.instance_id}/start-secrets", json=body)

    def start_secrets(self, assignment: Assignment) -> StartSecrets:
        """The secrets and registry credentials of this attempt."""
        answer = self.post_start_secrets(assignment)
        assert answer.status_code == 200, answer.text
        return StartSecrets.model_validate_json(answer.content)

    def close(self) -> None:
        self.http.close()


def websocket(url: str, authorization: str, *subprotocols: str) -> ClientConnection:
    """A connected WebSocket client, which does not send more than the server reads."""
    return connect(
        url,
        additional_headers={"Authorization": authorization},
        subprotocols=[Subprotocol(each) for each in subprotocols] or None,
        compression=None,
        ping_interval=None,
        proxy=None,
        max_size=None,
    )


def output(text: str, channel: Channel = Channel.STDOUT) -> bytes:
    return message(channel, text.encode())


def status(exit_code: int | None = None, code: str | None = None) -> bytes:
    """The last message of a stream: its exit code, or the code of the reason."""
    reason = StreamError(code=code, message="no") if code else None
    ended = StreamStatus(exit_code=exit_code, reason=reason)
    return message(Channel.STATUS, ended.model_dump_json().encode())


def observed(assignment: Assignment, phase: str, **fields: Any) -> ObservedInstance:
    """A node's observation of an assignment's container."""
    return ObservedInstance.model_validate(
        {
            "instance_id": assignment.instance_id,
            "attempt": assignment.attempt,
            "phase": phase,
            "container_id": f"{assignment.instance_id}-{assignment.attempt}",
            **fields,
        }
    )


class SimulatedNode:
    """The product's own agent over simulated containers and GPUs, in threads of this process."""

    def __init__(self, agent: Agent, runtime: SimulatedRuntime, identity: NodeIdentity) -> None:
        self.agent = agent
        self.runtime = runtime
        self.id = identity.node_id
        self.name = identity.node_name


@contextmanager
def simulated_node(
    admin: Client,
    directory: Path,
    name: str,
    *,
    gpus: int = 8,
    model: str = "H100",
    start_s: float = 0.0,
    labels: Mapping[str, str] = MappingProxyType({}),
    runtime_kind: type[SimulatedRuntime] = SimulatedRuntime,
) -> Iterator[SimulatedNode]:
    """Within the block, a node that joins, reports and carries out its assignments."""
    control_plane = ControlPlaneClient(str(admin.base_url))
    state = StateDirectory(directory)
    credential = state.credential_to_join()
    joined = control_plane.join(join_token(admin), name, name, credential)
    identity = NodeIdentity.from_answer(joined, credential)
    state.save_joined(identity)
    control_plane.identify(identity)
    runtime = runtime_kind(cpus=24 * max(1, gpus), memory_mib=262_144 * max(1, gpus), start_s=start_s)
    reader = SimulatedGpuReader(identity.node_id, gpus, model, users=runtime.gpu_users)
    agent = Agent(
        identity=identity,
        state=state,
        runtime=runtime,
        gpus=reader,
        control_plane=control_plane,
        machine=Machine(name, "127.0.0.1", dict(labels)),
        container_of=reader.container_of,
    )
    thread = threading.Thread(target=agent.run, name=name)
    thread.start()
    try:
        yield SimulatedNode(agent, runtime, identity)
    finally:
        agent.stop()
        thread.join(20)
        runtime.close()
        control_plane.close()
