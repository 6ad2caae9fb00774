"""Streams of the simulated engine, sent to a real WebSocket server."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from mooring.agent.decide.snapshot import Key
from mooring.agent.runtime import Container, ContainerStream
from mooring.agent.simulated.runtime import SimulatedRuntime
from mooring.agent.streams.loop import StreamLoop
from mooring.agent.streams.streams import Streams
from mooring.agent.sync.client import ControlPlaneClient
from mooring.agent.sync.identity import NodeIdentity
from mooring.schemas.agent import Assignment
from mooring.schemas.agent_streams import (
    DialRequest,
    ExecRequest,
    LogsRequest,
    StreamRequest,
    StreamStatus,
    WindowSize,
)
from mooring_client.stream_messages import STDIN_CLOSED, Channel, message
from tests.agent.builders import assignment, pull_and_start
from tests.agent.control_planes import OWN, TOKEN, TinyControlPlane, control_plane
from tests.agent.stream_receivers import ReceivedStream
from tests.testbed.waiting import wait_until

LOGS = LogsRequest(tail=None, since=None, follow=False)
FOLLOW = LogsRequest(tail=None, since=None, follow=True)
SHELL = ExecRequest(command=["sh"], tty=True, stdin=True, window=WindowSize(width=100, height=40))


class RecordingRuntime(SimulatedRuntime):
    """Counts the streams that are open."""

    def __init__(self) -> None:
        super().__init__(start_s=0)
        self.open = 0

    async def exec(self, container_id: str, request: ExecRequest) -> ContainerStream:
        return self._counted(await super().exec(container_id, request))

    async def logs(self, container_id: str, request: LogsRequest) -> ContainerStream:
        return self._counted(await super().logs(container_id, request))

    def _counted(self, stream: ContainerStream) -> ContainerStream:
        self.open += 1
        close = stream.close

        async def counted() -> None:
            await close()
            self.open -= 1

        stream.close = counted  # type: ignore[method-assign]
        return stream


class Node:
    """Streams over one running container."""

    def __init__(self, server: TinyControlPlane) -> None:
        self.server = server
        self.runtime = RecordingRuntime()
        self.container = self.run(assignment(instance_id="ins_1", command=None))
        self.control_plane = ControlPlaneClient(server.url)
        joined = self.control_plane.join(TOKEN, "n", "h", OWN)
        self.control_plane.identify(NodeIdentity.from_answer(joined, OWN))
        self.streams = self.new_streams()

    def new_streams(self, **more: Any) -> Streams:
        return Streams(
            self.runtime, self.control_plane, self.find, StreamLoop(), **{"keepalive_every_s": 0.05, **more}
        )

    def run(self, given: Assignment) -> Container:
        started = pull_and_start(self.runtime, given)
        assert started is not None
        return started

    def find(self, key: Key) -> Container | None:
        return next(
            (one for one in self.runtime.containers()[0] if (one.instance_id, one.attempt) == key), None
        )

    def request(self, stream_id: str, instance_id: str = "ins_1", **request: Any) -> None:
        url = self.server.receiver.url
        self.streams.serve(
            [StreamRequest(id=stream_id, instance_id=instance_id, attempt=1, url=url, **request)]
        )

    def serve(self, stream_id: str, instance_id: str = "ins_1", **request: Any) -> ReceivedStream:
        """Request a stream, and wait until the node has connected."""
        self.request(stream_id, instance_id, **request)
        return self.server.receiver.stream(stream_id)


@pytest.fixture
def node() -> Iterator[Node]:
    with control_plane() as server:
        made = Node(server)
        yield made
        made.streams.close()
        made.runtime.close()
        made.control_plane.close()


def send(stream: ReceivedStream, channel: Channel, data: bytes) -> None:
    stream.connection.send(message(channel, data))


def await_output(stream: ReceivedStream, wanted: bytes) -> None:
    wait_until(lambda: wanted in stream.output(), 20)


def reason_of(stream: ReceivedStream) -> str:
    reason = stream.ended().reason
    assert reason is not None
    return reason.code


def test_logs(node: Node) -> None:
    stream = node.serve("str_1", logs=LOGS)
    assert stream.ended() == StreamStatus()
    assert stream.lines() == ["simulated: nothing runs here, on 0 GPUs"]
    wait_until(lambda: stream.has_ended)


def test_exec(node: Node) -> None:
    stream = node.serve("str_1", exec=ExecRequest(command=["echo", "hi"], timeout_s=5, max_output_bytes=100))
    assert stream.ended() == StreamStatus(exit_code=0)
    assert stream.output() == b"hi\n"


def test_output_beyond_its_limit_is_dropped(node: Node) -> None:
    stream = node.serve("str_1", exec=ExecRequest(command=["echo", "0123456789"], max_output_bytes=4))
    assert stream.ended() == StreamStatus(exit_code=0, truncated=True)
    assert stream.output() == b"0123"


def test_a_shell_in_a_terminal(node: Node) -> None:
    stream = node.serve("str_1", exec=SHELL)
    await_output(stream, b"$ ")
    send(stream, Channel.STDIN, b"stty size\r")
    await_output(stream, b"stty size\r\n40 100\r\n$ ")
    send(stream, Channel.RESIZE, b'{"Width": 120, "Height": 50}')
    send(stream, Channel.STDIN, b"stty size\r")
    await_output(stream, b"50 120\r\n$ ")
    send(stream, Channel.STDIN, b"sleep 1000\r")
    await_output(stream, b"sleep 1000\r\n")
    send(stream, Channel.STDIN, b"\x03")
    await_output(stream, b"^C\r\n$ ")
    send(stream, Channel.STDIN, b"exix\x7ft 7\r")
    assert stream.ended() == StreamStatus(exit_code=7)


def test_the_end_of_the_input_ends_a_program_that_reads_it(node: Node) -> None:
    stream = node.serve("str_1", exec=ExecRequest(command=["cat"], stdin=True))
    send(stream, Channel.STDIN, b"one\xff")
    send(stream, Channel.STDIN, b"two")
    await_output(stream, b"one\xfftwo")
    stream.connection.send(STDIN_CLOSED)
    assert stream.ended() == StreamStatus(exit_code=0)


def test_a_signal_ends_a_command(node: Node) -> None:
    stream = node.serve("str_1", exec=ExecRequest(command=["sleep", "1000"]))
    send(stream, Channel.SIGNAL, b'{"Signal": "TERM"}')
    assert stream.ended() == StreamStatus(exit_code=143)


def test_a_command_that_takes_too_long_is_ended(node: Node) -> None:
    stream = node.serve("str_1", exec=ExecRequest(command=["sleep", "1000"], timeout_s=1))
    assert reason_of(stream) == "exec_timeout"
    wait_until(lambda: node.runtime.open == 0)


def test_a_port(node: Node) -> None:
    stream = node.serve("str_1", dial=DialRequest(port=8888))
    send(stream, Channel.STDIN, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await_output(stream, b"simulated: port 8888 of ins_1\n")
    stream.connection.send(STDIN_CLOSED)
    assert stream.ended() == StreamStatus()
    assert (Channel.CLOSE, bytes([Channel.STDOUT])) in stream.messages


def test_a_port_rejects_what_is_not_http(node: Node) -> None:
    stream = node.serve("str_1", dial=DialRequest(port=8888))
    send(stream, Channel.STDIN, b"\x16\x03\x01\r\n\r\n")
    await_output(stream, b"400 Bad Request")
    assert stream.ended() == StreamStatus()


def test_each_request_is_served_once(node: Node) -> None:
    for _ in range(3):
        node.request("str_1", logs=LOGS)
    assert node.serve("str_2", logs=LOGS).ended() == StreamStatus()
    stream = node.server.receiver.stream("str_1")
    assert stream.ended() == StreamStatus()
    assert len(stream.lines()) == 1


@pytest.mark.parametrize(
    "kind", [{"logs": LOGS}, {"exec": ExecRequest(command=["true"])}, {"dial": DialRequest(port=1)}]
)
def test_a_stream_of_an_unknown_instance_is_refused(node: Node, kind: dict[str, Any]) -> None:
    assert reason_of(node.serve("str_1", "ins_other", **kind)) == "not_running"


def test_a_stream_of_an_unknown_kind_is_refused(node: Node) -> None:
    assert reason_of(node.serve("str_1")) == "not_supported"


def test_exec_in_an_ended_container_is_refused_and_its_logs_are_served(node: Node) -> None:
    node.runtime.begin_stop(node.container)
    assert reason_of(node.serve("str_1", exec=ExecRequest(command=["true"]))) == "not_running"
    assert node.serve("str_2", logs=LOGS).ended() == StreamStatus()


def test_the_end_of_the_container_ends_its_commands(node: Node) -> None:
    stream = node.serve("str_1", exec=SHELL)
    await_output(stream, b"$ ")
    node.runtime.begin_stop(node.container)
    assert stream.ended().exit_code == 137


def test_an_unavailable_engine_is_the_reason(node: Node) -> None:
    container = node.container
    node.streams = Streams(node.runtime, node.control_plane, lambda _: container, StreamLoop())
    node.runtime.unavailable = True
    assert reason_of(node.serve("str_1", logs=LOGS)) == "docker_unavailable"


def test_an_engine_that_becomes_unavailable_ends_a_follow(node: Node) -> None:
    stream = node.serve("str_1", logs=FOLLOW)
    wait_until(stream.lines)
    node.runtime.unavailable = True
    assert reason_of(stream) == "docker_unavailable"


def test_a_follow_without_output_sends_keepalives(node: Node) -> None:
    stream = node.serve("str_1", logs=FOLLOW)
    wait_until(lambda: stream.keepalives >= 3)
    node.runtime.begin_stop(node.container)
    assert stream.ended() == StreamStatus()


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_lost_connection_ends_the_stream(node: Node, how: str) -> None:
    stream = node.serve("str_1", exec=SHELL)
    await_output(stream, b"$ ")
    assert node.runtime.open == 1
    if how == "close":
        stream.connection.close()
    else:
        stream.disconnect()
    wait_until(lambda: node.runtime.open == 0, 20)


def test_a_connection_that_is_lost_while_the_program_reads_nothing_ends_the_stream(node: Node) -> None:
    """The node reads nothing either, so only its keepalives find the loss."""
    stream = node.serve("str_1", exec=ExecRequest(command=["cat"], stdin=True))
    node.server.receiver.reading.clear()

    def flood() -> None:
        try:
            while True:
                send(stream, Channel.STDIN, bytes(64 * 1024))
        except (ConnectionClosed, OSError):
            return

    thread = threading.Thread(target=flood)
    thread.start()
    thread.join(1)
    assert thread.is_alive()  # everything between the two is full
    stream.disconnect()
    wait_until(lambda: node.runtime.open == 0, 20)
    node.server.receiver.reading.set()
    thread.join(20)


@pytest.mark.parametrize("sent", [b"", b"\x63x", b"\x04nonsense", b'\x05{"Signal": "rm -rf"}'])
def test_an_invalid_message_ends_the_stream(node: Node, sent: bytes) -> None:
    stream = node.serve("str_1", exec=SHELL)
    stream.connection.send(sent)
    wait_until(lambda: stream.has_ended and node.runtime.open == 0, 20)
    assert stream.status is None


@pytest.mark.parametrize("sent", [b"\x00", b"\x01x", b"\x02x", b"\x03{}", b"\xff\x01", "\x00"])
def test_keepalives_and_messages_on_channels_of_nodes_are_ignored(node: Node, sent: bytes | str) -> None:
    stream = node.serve("str_1", exec=SHELL)
    stream.connection.send(sent)
    send(stream, Channel.STDIN, b"exit 3\r")
    assert stream.ended() == StreamStatus(exit_code=3)


@pytest.mark.parametrize("kind", [{"exec": ExecRequest(command=["cat"])}, {"dial": DialRequest(port=80)}])
def test_input_after_its_end_is_dropped(node: Node, kind: dict[str, Any]) -> None:
    stream = node.serve("str_1", **kind)
    # In one write: the stream ends soon after the first message.
    with stream.connection.protocol_mutex:
        for each in (STDIN_CLOSED, message(Channel.STDIN, b"late"), STDIN_CLOSED):
            stream.connection.protocol.send_binary(each)
        stream.connection.send_data()
    assert stream.ended().reason is None
    assert stream.output() == b""


def test_an_error_of_the_agent_is_the_reason(node: Node) -> None:
    found = iter([node.container])
    node.streams = Streams(node.runtime, node.control_plane, lambda _: next(found), StreamLoop())
    assert reason_of(node.serve("str_1", logs=LOGS)) == "internal_error"


@pytest.mark.parametrize("url", ["http://10.0.0.7:8700", "http://127.0.0.1:1", "nonsense"])
def test_a_stream_that_cannot_connect_takes_no_place(node: Node, url: str) -> None:
    node.serve("str_1", logs=FOLLOW)
    unreachable = [
        StreamRequest(id=f"str_x{number}", instance_id="ins_1", attempt=1, url=url, exec=SHELL)
        for number in range(20)
    ]
    node.streams.serve(unreachable)
    wait_until(lambda: node.streams._open.total() == 1 and list(node.streams._cancels) == ["str_1"], 20)
    wait_until(lambda: node.runtime.open == 1)


def test_the_streams_of_a_project_are_limited_and_others_are_served(node: Node) -> None:
    node.run(assignment(instance_id="ins_2", project_id="prj_2", command=None))
    node.streams = node.new_streams(of_project=2)
    first = node.serve("str_0", logs=FOLLOW)
    node.serve("str_1", logs=FOLLOW)
    node.request("str_2", logs=FOLLOW)
    assert node.serve("str_other", "ins_2", logs=LOGS).ended() == StreamStatus()
    assert "str_2" not in node.server.receiver
    # The place of a stream that has ended is free again.
    first.connection.close()
    wait_until(lambda: node.runtime.open == 1, 20)
    wait_until(lambda: node.streams._open.total() == 1)
    node.serve("str_3", logs=FOLLOW)


def test_close_ends_all_streams(node: Node) -> None:
    streams = [node.serve(f"str_{number}", exec=SHELL) for number in range(5)]
    wait_until(lambda: node.runtime.open == 5)
    node.streams.close()
    assert node.runtime.open == 0
    wait_until(lambda: all(stream.has_ended for stream in streams))


def test_a_hundred_streams_need_no_threads(node: Node) -> None:
    node.serve("str_0", logs=FOLLOW)
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("stream")]
    for number in range(1, 100):
        node.serve(f"str_{number}", logs=FOLLOW)
    wait_until(lambda: node.runtime.open == 100)
    assert [each.name for each in threading.enumerate() if each.name.startswith("stream")] == ours
