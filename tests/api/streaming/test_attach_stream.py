"""Attaching to the main process over a WebSocket: the replica between a user and a node."""

import pytest

from mooring.schemas.agent_streams import StreamStatus
from mooring_client.stream_messages import KEEPALIVE, STDIN_CLOSED, Channel, message
from tests.api.streaming.conftest import Streams
from tests.api.streaming.test_exec_stream import received_status


@pytest.mark.parametrize("stdin", ["true", "false"])
def test_the_node_is_asked_to_attach(streams: Streams, stdin: str) -> None:
    query = [("stdin", stdin), ("width", "120"), ("height", "50")]
    user, node = streams.open("attach/stream", query)
    if stdin == "true":
        user.send(message(Channel.STDIN, b"x"))
        assert node.recv(timeout=20) == message(Channel.STDIN, b"x")
        user.send(STDIN_CLOSED)
        assert node.recv(timeout=20) == STDIN_CLOSED
    node.send(KEEPALIVE)
    node.send(message(Channel.STDOUT, b"out"))
    assert user.recv(timeout=20, decode=False) == message(Channel.STDOUT, b"out")
    node.send(_status(7))
    assert received_status(user)["exit_code"] == 7


def _status(exit_code: int) -> bytes:
    return message(Channel.STATUS, StreamStatus(exit_code=exit_code).model_dump_json().encode())
