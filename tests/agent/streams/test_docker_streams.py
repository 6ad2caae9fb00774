"""Streams of a whole agent on a real node: what comes through, and what remains when they end."""

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container
from mooring.agent.simulated.gpus import SimulatedGpuReader
from mooring.schemas.agent import Assignment
from mooring.schemas.agent_streams import DialRequest, ExecRequest, StreamRequest
from mooring_client.stream_messages import MAX_DATA_BYTES, STDIN_CLOSED, Channel, message
from tests.agent.agents import agent_with
from tests.agent.control_planes import TinyControlPlane
from tests.agent.docker_assignments import assignment, processes_in
from tests.agent.stream_receivers import ReceivedStream
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024
WITHIN_S = 30.0
WITH_CHILDREN = ["sh", "-c", "sleep 4444 & echo up; sleep 5555"]


class Node:
    """An agent with one running instance."""

    def __init__(self, server: TinyControlPlane, runtime: DockerRuntime, **spec: Any) -> None:
        self._server, self._runtime = server, runtime
        self._instance: Assignment = assignment(**spec)
        server.wants(self._instance)
        wait_until(lambda: server.phase(self._instance) == "running", WITHIN_S)
        self.container = self._found()

    def _found(self) -> Container:
        [container] = self._runtime.containers()[0]
        return container

    @property
    def receiving(self) -> threading.Event:
        return self._server.receiver.reading

    def serve(self, stream_id: str = "str_1", **request: Any) -> ReceivedStream:
        """Request a stream, and wait until the node has connected."""
        fields = {"id": stream_id, "instance_id": self._instance.instance_id, "attempt": 1, "url": None}
        self._server.request_streams(StreamRequest.model_validate({**fields, **request}))
        return self._server.receiver.stream(stream_id)

    def runs(self, argument: str) -> bool:
        """Whether a command with this argument runs in the container."""
        return any(argument in each.split("\0") for each in processes_in(self.container))

    def await_commands(self, *arguments: str) -> None:
        wait_until(lambda: all(map(self.runs, arguments)), WITHIN_S)

    def await_end_of_commands(self, *arguments: str) -> None:
        """Only these commands end, not the container."""
        wait_until(lambda: not any(map(self.runs, arguments)), WITHIN_S)
        assert self._found() == self.container


NewNode = Callable[..., Node]


@pytest.fixture
def new_node(docker_server: TinyControlPlane, runtime: DockerRuntime) -> NewNode:
    return lambda **spec: Node(docker_server, runtime, **spec)


def await_output(stream: ReceivedStream, wanted: bytes) -> None:
    wait_until(lambda: wanted in stream.output(), WITHIN_S)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_lost_connection_kills_the_command_and_its_children(new_node: NewNode, how: str) -> None:
    node = new_node()
    stream = node.serve(exec=ExecRequest(command=WITH_CHILDREN, stdin=True))
    await_output(stream, b"up\n")
    node.await_commands("4444", "5555")
    if how == "close":
        stream.connection.close()
    else:
        stream.disconnect()
    node.await_end_of_commands("4444", "5555")


def test_a_command_that_takes_too_long_is_killed_with_its_children(new_node: NewNode) -> None:
    node = new_node()
    stream = node.serve(exec=ExecRequest(command=WITH_CHILDREN, timeout_s=2))
    reason = stream.ended(WITHIN_S).reason
    assert (reason and reason.code, stream.output()) == ("exec_timeout", b"up\n")
    node.await_end_of_commands("4444", "5555")


def test_a_command_that_takes_too_long_is_killed_although_nobody_reads_its_output(new_node: NewNode) -> None:
    node = new_node()
    node.receiving.clear()
    node.serve(exec=ExecRequest(command=["yes", "7777"], timeout_s=2))
    node.await_commands("7777")
    node.await_end_of_commands("7777")


def test_the_end_of_the_agent_kills_the_commands_that_it_started(
    runtime: DockerRuntime, tmp_path: Path
) -> None:
    with closing(SimulatedGpuReader("gpu-1", 0, users=runtime.gpu_users)) as gpus:
        with agent_with(runtime, gpus, gpus.container_of, tmp_path) as server:
            node = Node(server, runtime)
            for number in range(3):
                node.serve(f"str_{number}", exec=ExecRequest(command=WITH_CHILDREN, stdin=True))
            node.await_commands("4444", "5555")
        assert processes_in(node.container)
        assert not node.runs("4444")
        assert not node.runs("5555")


def test_bytes_pass_in_both_directions_until_the_input_ends(new_node: NewNode) -> None:
    node = new_node()
    sent = os.urandom(8 * MIB)
    stream = node.serve(exec=ExecRequest(command=["cat"], stdin=True))
    for at in range(0, len(sent), MAX_DATA_BYTES):
        stream.connection.send(message(Channel.STDIN, sent[at : at + MAX_DATA_BYTES]))
    stream.connection.send(STDIN_CLOSED)
    assert stream.ended(60).exit_code == 0
    assert hashlib.sha256(stream.output()).digest() == hashlib.sha256(sent).digest()


def test_a_command_waits_for_the_reader_of_its_output(new_node: NewNode) -> None:
    """Otherwise the agent would hold the output in its memory."""
    node = new_node()
    total = 64 * MIB
    node.receiving.clear()
    stream = node.serve(
        exec=ExecRequest(command=["dd", "if=/dev/zero", "bs=65536", f"count={total // 65536}"])
    )
    wait_until(lambda: writer_of(node.container), WITHIN_S)
    written = [-1, -2]

    def waits() -> bool:
        written.append(psutil.Process(writer_of(node.container)).io_counters().write_chars)
        return written[-1] == written[-2]

    wait_until(waits, WITHIN_S, interval_s=1)
    assert written[-1] < 32 * MIB
    node.receiving.set()
    assert stream.ended(60).exit_code == 0
    assert len(stream.output()) == total


def writer_of(container: Container) -> int:
    """The pid of the `dd` of the container; 0: it does not run."""
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == "dd" and container.container_id in cgroup_of(process.pid):
                return process.pid
        except OSError:
            continue
    return 0


def cgroup_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_a_port_that_only_the_container_reaches(new_node: NewNode) -> None:
    node = new_node(command=["sh", "-c", "echo hello > /tmp/page; httpd -f -p 127.0.0.1:8888 -h /tmp"])
    await_listener(node)
    stream = node.serve("str_http", dial=DialRequest(port=8888))
    stream.connection.send(message(Channel.STDIN, b"GET /page HTTP/1.0\r\n\r\n"))
    await_output(stream, b"\r\n\r\nhello\n")
    wait_until(lambda: (Channel.CLOSE, bytes([Channel.STDOUT])) in stream.messages, WITHIN_S)
    stream.connection.send(STDIN_CLOSED)
    assert stream.ended(WITHIN_S).reason is None


def await_listener(node: Node) -> None:
    answers: list[ReceivedStream] = []

    def listens() -> bool:
        number = len(answers)
        answers.append(node.serve(f"str_{number}", exec=ExecRequest(command=["cat", "/proc/net/tcp"])))
        assert answers[-1].ended(WITHIN_S).exit_code == 0
        return b"0100007F:22B8 00000000:0000 0A" in answers[-1].output()

    wait_until(listens, WITHIN_S)
