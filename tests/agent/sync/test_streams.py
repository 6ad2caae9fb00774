"""Logs and exec from the simulated engine, uploaded to a real HTTP server."""

from collections.abc import Iterator
from typing import Any

import pytest

from mooring.agent.decide.snapshot import Key
from mooring.agent.runtime import Container
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.identity import NodeIdentity
from mooring.agent.sync.streams import Streams
from mooring.agent.sync.workers import Workers
from mooring.schemas.agent import Assignment
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamFrame, StreamRequest
from tests.agent.builders import assignment, pull_and_start
from tests.agent.control_planes import OWN, TOKEN, TinyControlPlane, control_plane
from tests.testbed.waiting import wait_until

LOGS = LogsRequest(tail=None, since=None, follow=False)
FOLLOW = LogsRequest(tail=None, since=None, follow=True)


class Node:
    """Streams over one running container."""

    def __init__(self, server: TinyControlPlane) -> None:
        self.server = server
        self.runtime = SimulatedRuntime(start_s=0)
        self.container = self.run(assignment(instance_id="ins_1", command=None))
        self.control_plane = ControlPlaneClient(server.url)
        joined = self.control_plane.join(TOKEN, "n", "h", OWN)
        self.control_plane.identify(NodeIdentity.from_answer(joined, OWN))
        self.streams = Streams(
            self.runtime, self.control_plane, self.find, Workers("stream", 4), heartbeat_s=0.05
        )

    def run(self, given: Assignment) -> Container:
        started = pull_and_start(self.runtime, given)
        assert started is not None
        return started

    def find(self, key: Key) -> Container | None:
        return next(
            (one for one in self.runtime.containers()[0] if (one.instance_id, one.attempt) == key), None
        )

    def serve(self, stream_id: str, instance_id: str = "ins_1", **request: Any) -> None:
        self.streams.serve(
            [StreamRequest(id=stream_id, instance_id=instance_id, attempt=1, url=None, **request)]
        )

    def frames(self, stream_id: str) -> list[StreamFrame]:
        return self.server.uploads.get(stream_id, [])

    def ended(self, stream_id: str) -> StreamFrame:
        """Wait for the last frame."""

        def last() -> StreamFrame | None:
            frames = self.frames(stream_id)
            return frames[-1] if frames and frames[-1].is_last else None

        return wait_until(last)


@pytest.fixture
def node() -> Iterator[Node]:
    with control_plane() as server:
        made = Node(server)
        yield made
        made.runtime.close()
        made.control_plane.close()


def test_logs(node: Node) -> None:
    node.serve("str_1", logs=LOGS)
    assert node.ended("str_1").end
    assert [frame.text for frame in node.frames("str_1")[:-1]] == ["simulated: nothing runs here, on 0 GPUs"]


def test_exec(node: Node) -> None:
    node.serve("str_1", exec=ExecRequest(command=["echo", "hi"], timeout_s=5, max_output_bytes=100))
    assert node.ended("str_1").exit_code == 0
    assert node.frames("str_1")[0].text == "hi\n"


def test_each_request_is_served_once(node: Node) -> None:
    for _ in range(3):
        node.serve("str_1", logs=LOGS)
    node.serve("str_2", logs=LOGS)
    assert node.ended("str_2").end
    assert node.ended("str_1").end
    assert sum(frame.end for frame in node.frames("str_1")) == 1


@pytest.mark.parametrize(
    "kind", [{"logs": LOGS}, {"exec": ExecRequest(command=["true"], timeout_s=1, max_output_bytes=1)}]
)
def test_a_stream_of_an_unknown_instance_is_an_error(node: Node, kind: dict[str, Any]) -> None:
    node.serve("str_1", "ins_other", **kind)
    error = node.ended("str_1").error
    assert error is not None and error.code == "not_running"


def test_exec_in_an_ended_container_is_an_error_and_its_logs_are_served(node: Node) -> None:
    node.runtime.begin_stop(node.container)
    node.serve("str_1", exec=ExecRequest(command=["true"], timeout_s=1, max_output_bytes=1))
    error = node.ended("str_1").error
    assert error is not None and error.code == "not_running"
    node.serve("str_2", logs=LOGS)
    assert node.ended("str_2").end


def test_an_unavailable_engine_leads_to_an_error_frame(node: Node) -> None:
    node.streams = Streams(
        node.runtime, node.control_plane, lambda _: node.container, Workers("stream", 4), heartbeat_s=0.05
    )
    node.runtime.unavailable = True
    node.serve("str_1", logs=LOGS)
    error = node.ended("str_1").error
    assert error is not None and error.code == "docker_unavailable"


def test_a_follow_without_output_gets_empty_frames(node: Node) -> None:
    node.serve("str_1", logs=FOLLOW)
    wait_until(lambda: node.frames("str_1").count(StreamFrame()) >= 3)
    node.runtime.begin_stop(node.container)
    assert node.ended("str_1").end


def test_a_lost_connection_ends_the_follow(node: Node) -> None:
    closed: list[bool] = []

    class Watched(SimulatedRuntime):
        def logs(self, container_id: str, request: LogsRequest) -> Iterator[StreamFrame]:
            try:
                yield from node.runtime.logs(container_id, request)
            finally:
                closed.append(True)

    node.streams = Streams(Watched(), node.control_plane, node.find, Workers("stream", 1), heartbeat_s=0.05)
    node.serve("str_1", logs=FOLLOW)
    wait_until(lambda: node.frames("str_1"))
    node.server.shutting_down = True  # the server closes the connection at the next frame
    wait_until(lambda: closed)


def test_follows_of_one_project_leave_threads_to_the_streams_of_another(node: Node) -> None:
    node.run(assignment(instance_id="ins_2", project_id="prj_2", command=None))
    workers = Workers("stream", 4, each=2, waiting=4)
    node.streams = Streams(node.runtime, node.control_plane, node.find, workers, heartbeat_s=0.05)
    for number in range(40):
        node.serve(f"str_{number}", logs=FOLLOW)
    wait_until(lambda: len(node.server.uploads) == 2)
    node.serve("str_other", "ins_2", logs=LOGS)
    assert node.ended("str_other").end
    node.runtime.begin_stop(node.container)
    # Two ran and four waited; the others were rejected.
    wait_until(lambda: workers.idle)
    assert len(node.server.uploads) == 2 + 4 + 1
