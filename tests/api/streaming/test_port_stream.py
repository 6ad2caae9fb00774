"""Connections to ports over WebSockets: the replica between a user and a node."""

import threading

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mooring.schemas.agent_streams import DialRequest
from mooring_client.stream_messages import STDIN_CLOSED, STDOUT_CLOSED, Channel, message
from tests.api.streaming.conftest import Streams
from tests.nodes import output, status

PORT = "ports/8888/stream"


def test_bytes_pass_in_both_directions_and_each_direction_ends_by_itself(streams: Streams) -> None:
    user, node = streams.open(PORT, [], subprotocols=("tcp",))
    assert user.subprotocol == "tcp"
    user.send(b"GET / HTTP/1.1\r\n")
    assert node.recv(timeout=20) == message(Channel.STDIN, b"GET / HTTP/1.1\r\n")
    user.send(b"")
    assert node.recv(timeout=20) == STDIN_CLOSED
    node.send(output("HTTP/1.1 200 OK\r\n"))
    assert user.recv(timeout=20) == b"HTTP/1.1 200 OK\r\n"
    node.send(STDOUT_CLOSED)
    assert user.recv(timeout=20) == b""
    node.send(status())
    with pytest.raises(ConnectionClosed):
        user.recv(timeout=20)
    assert user.close_code == 1000


def test_a_lost_node_ends_the_connection_with_the_reason(streams: Streams) -> None:
    user, node = streams.open(PORT, [], subprotocols=("tcp",))
    node.close()
    with pytest.raises(ConnectionClosed):
        user.recv(timeout=20)
    assert user.close_code == 1011
    assert (user.close_reason or "").startswith("node_timeout: ")


def test_a_port_on_which_nothing_listens_is_rejected(streams: Streams) -> None:
    rejected: list[InvalidStatus] = []

    def connect() -> None:
        with pytest.raises(InvalidStatus) as raised:
            streams.connect(PORT, [], subprotocols=("tcp",))
        rejected.append(raised.value)

    thread = threading.Thread(target=connect)
    thread.start()
    request = streams.next_request()
    assert request.dial == DialRequest(port=8888)
    streams.sandbox.node.bring(request.id, status(code="port_not_listening"))
    thread.join(20)
    assert rejected[0].response.status_code == 409
    assert b'"code":"port_not_listening"' in rejected[0].response.body


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_an_invalid_port_is_rejected(streams: Streams, port: str) -> None:
    with pytest.raises(InvalidStatus) as rejected:
        streams.connect(f"ports/{port}/stream", [], subprotocols=("tcp",))
    assert rejected.value.response.status_code == 422


def test_the_subprotocol_of_commands_is_rejected(streams: Streams) -> None:
    with pytest.raises(InvalidStatus) as rejected:
        streams.connect(PORT, [])
    assert rejected.value.response.status_code == 400
