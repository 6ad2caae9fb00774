"""Commands over WebSockets: the replica between a user and a node."""

import json
import socket
import threading
from contextlib import suppress
from select import select
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from mooring.control.instances import streams as control_streams
from mooring.schemas.agent_streams import ExecRequest
from mooring.streams import node_streams, websockets
from mooring.streams.websockets import StreamProtocol
from mooring_client.stream_messages import KEEPALIVE, STDIN_CLOSED, Channel, message
from tests.api.streaming.conftest import Streams
from tests.nodes import output, status
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024
# Rule R29 of docs/security.md.
CLOSED_WITHIN_S = 5.0


def rejection(streams: Streams, *arguments: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    """The status and the problem document of a handshake that fails."""
    with pytest.raises(InvalidStatus) as rejected:
        streams.connect(*arguments, **more)
    answer = rejected.value.response
    assert answer.headers["Content-Type"] == "application/problem+json"
    return answer.status_code, json.loads(answer.body)


def received_status(user: ClientConnection) -> dict[str, Any]:
    """Read to the end. Returns the status, which must be the last message."""
    last = b""
    try:
        while True:
            last = user.recv(timeout=20, decode=False)
    except ConnectionClosed:
        assert last[:1] == bytes([Channel.STATUS]), last
        return dict(json.loads(last[1:]))


def test_bytes_pass_in_both_directions_and_the_status_ends_the_stream(streams: Streams) -> None:
    user, node = streams.open()
    assert user.subprotocol == "v5.channel.k8s.io"
    user.send(message(Channel.STDIN, b"l\xffs\n"))
    assert node.recv(timeout=20) == message(Channel.STDIN, b"l\xffs\n")
    user.send(message(Channel.RESIZE, b'{"Width": 120, "Height": 50}'))
    assert node.recv(timeout=20) == message(Channel.RESIZE, b'{"Width":120,"Height":50}')
    user.send(message(Channel.SIGNAL, b'{"Signal": "INT"}'))
    assert node.recv(timeout=20) == message(Channel.SIGNAL, b'{"Signal":"INT"}')
    user.send(STDIN_CLOSED)
    assert node.recv(timeout=20) == STDIN_CLOSED
    for sent in (output("out"), KEEPALIVE, output("err", Channel.STDERR), status(3)):
        node.send(sent)
    assert user.recv(timeout=20) == b"\x01out"
    assert user.recv(timeout=20) == b"\x02err"
    assert received_status(user) == {"exit_code": 3, "reason": None}
    assert user.close_code == 1000


def test_the_node_gets_the_whole_request(streams: Streams) -> None:
    query = [
        ("command", "python"), ("command", "-c"), ("command", "print(1)"), ("tty", "true"),
        ("user", "1000:100"), ("working_dir", "/data"), ("env", "A=1"), ("env", "B=x=y"),
        ("width", "100"), ("height", "40"),
    ]  # fmt: skip
    thread = threading.Thread(target=lambda: streams.connect(query=query))
    thread.start()
    request = streams.next_request()
    streams.sandbox.node.bring(request.id, KEEPALIVE, status(0))
    thread.join(20)
    assert request.exec == ExecRequest(
        command=["python", "-c", "print(1)"], tty=True, user="1000:100", working_dir="/data",
        env={"A": "1", "B": "x=y"}, window={"Width": 100, "Height": 40},
    )  # fmt: skip


def test_a_client_without_a_subprotocol_is_accepted(streams: Streams) -> None:
    user, node = streams.open(subprotocols=())
    assert user.subprotocol is None
    node.send(status(0))
    assert received_status(user) == {"exit_code": 0, "reason": None}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ([], 422),
        ([("command", "a\0b")], 400),
        ([("command", "a"), ("env", "1=2")], 422),
        ([("command", "a"), ("width", "0")], 422),
        ([("command", "a")] * 129, 422),
        ([("command", "a"), ("working_dir", "/proc/self/fd/8")], 422),
        ([("command", "a"), ("working_dir", "//a/../proc//1/cwd")], 422),
        ([("command", "a"), ("working_dir", "relative")], 422),
    ],
)
def test_an_invalid_request_is_rejected_before_the_handshake(
    streams: Streams, query: list[tuple[str, str]], code: int
) -> None:
    assert rejection(streams, query=query)[0] == code
    assert streams.sandbox.node.stream_requests() == []


def test_a_handshake_that_offers_other_subprotocols_only_is_rejected(streams: Streams) -> None:
    assert rejection(streams, subprotocols=("tcp",))[1]["code"] == "bad_request"


def test_a_request_without_a_handshake_says_what_is_needed(streams: Streams) -> None:
    answer = streams.sandbox.client.get(f"/v1/instances/{streams.instance_id}/exec/stream?command=sh")
    assert "WebSocket" in problem(answer, 426, "upgrade_required")["detail"]


def test_an_unknown_instance_and_one_that_does_not_run_are_rejected(streams: Streams) -> None:
    running, streams.instance_id = streams.instance_id, "ins_none"
    assert rejection(streams)[1]["code"] == "not_found"
    streams.instance_id = streams.sandbox.create(gpus={"count": 64})["id"]
    assert rejection(streams)[1]["code"] == "not_running"
    streams.instance_id = running
    answer = streams.sandbox.client.post(f"/v1/instances/{running}/stop", json={})
    assert answer.status_code == 202


def test_the_nodes_refusal_is_the_answer_to_the_handshake(streams: Streams) -> None:
    refusals: list[tuple[int, dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: refusals.append(rejection(streams)))
    thread.start()
    streams.sandbox.node.bring(streams.next_request().id, status(code="not_running"))
    thread.join(20)
    assert (refusals[0][0], refusals[0][1]["code"]) == (409, "not_running")


def test_a_node_that_does_not_connect_is_reported(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_streams, "DIAL_IN_S", 0.3)
    assert rejection(streams)[1]["code"] == "node_timeout"
    wait_until(lambda: streams.sandbox.node.stream_requests() == [])


def test_a_node_that_stops_sending_ends_the_stream(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_streams, "SILENCE_S", 0.5)
    user, node = streams.open()
    reason = received_status(user)["reason"]
    assert reason["code"] == "node_timeout"
    with pytest.raises(ConnectionClosed):
        node.recv(timeout=20)


def test_a_node_that_ends_without_a_status_is_reported(streams: Streams) -> None:
    user, node = streams.open()
    node.close()
    assert received_status(user)["reason"]["code"] == "node_timeout"
    assert user.close_code == 1011


@pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
def test_a_user_who_disconnects_ends_the_nodes_connection(streams: Streams, how: str) -> None:
    user, node = streams.open()
    if how == "close":
        user.close()
    elif how == "shutdown":
        user.socket.shutdown(socket.SHUT_RDWR)
    else:
        user.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        user.socket.close()
    with pytest.raises(ConnectionClosed):
        node.recv(timeout=20)


def test_a_user_who_disconnects_while_the_node_reads_nothing_ends_the_nodes_connection(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_streams, "SILENCE_S", 300)
    user, node = streams.open()
    thread = threading.Thread(target=lambda: _flood(user))
    thread.start()
    # Everything between the two is full: the user cannot send any more.
    wait_until(lambda: not _sends(streams, user), 20)
    user.socket.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    server = streams.sandbox.service.service._server
    wait_until(lambda: len(server._context.streams.channels) == 0, 30)
    # The node reads nothing, so it cannot read that the connection ends either.
    wait_until(lambda: not _websockets(server), 30)
    node.socket.close()


def _websockets(server: uvicorn.Server) -> list[StreamProtocol]:
    """The open WebSockets of a server."""
    return [each for each in server.server_state.connections if isinstance(each, StreamProtocol)]


def _silent_user(streams: Streams) -> socket.socket:
    """A client that answers no ping."""
    query = [("command", "cat"), ("stdin", "true")]
    url = urlsplit(streams.url("exec/stream", query))
    made = socket.create_connection((url.hostname, url.port), 20)
    head = [
        f"GET {url.path}?{url.query} HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: websocket",
        f"Authorization: {streams.sandbox.client.headers['Authorization']}",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", "",
    ]  # fmt: skip
    made.sendall("\r\n".join(head).encode())
    return made


def test_a_user_who_answers_no_ping_is_disconnected(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websockets.StreamProtocol, "ping_every_s", 0.1)
    monkeypatch.setattr(websockets, "SILENCE_S", 0.5)
    monkeypatch.setattr(node_streams, "SILENCE_S", 300)  # of the node, which also sends nothing
    channels = streams.sandbox.service.service._server._context.streams.channels
    with _silent_user(streams) as user, streams.sandbox.node.connect(streams.next_request().id) as node:
        node.send(KEEPALIVE)
        assert user.recv(1000).startswith(b"HTTP/1.1 101 ")
        wait_until(lambda: len(channels) == 0, 20)


def test_a_user_is_not_disconnected_because_the_program_reads_nothing(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server then reads no answers to its pings."""
    user, node = streams.open()
    thread = threading.Thread(target=lambda: _flood(user))
    thread.start()
    wait_until(lambda: not _sends(streams, user), 20)
    monkeypatch.setattr(websockets, "SILENCE_S", 0.1)
    server = streams.sandbox.service.service._server
    [of_user] = [each for each in _websockets(server) if each.read_paused]
    of_user.loop.call_soon_threadsafe(of_user._ping)
    with pytest.raises(AssertionError):
        wait_until(lambda: len(server._context.streams.channels) == 0, 1)
    user.socket.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    node.socket.close()


def _flood(user: ClientConnection) -> None:
    with suppress(ConnectionClosed, OSError):
        while True:
            user.send(message(Channel.STDIN, bytes(64 * 1024)))


def _sends(streams: Streams, user: ClientConnection) -> bool:
    """Whether the user's socket takes data, within 0.3 s."""
    return bool(select([], [user.socket], [], 0.3)[1])


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ("text", "binary"),
        (b"", "first byte"),
        (b"\x09x", "no channel 9"),
        (b"\x01x", "may not send"),
        (b"\x03{}", "may not send"),
        (b"\x04{}", "not valid"),
        (b'\x04{"Width": -1, "Height": 1}', "not valid"),
        (b"\x05{", "not valid"),
        (b"\xff\x01", "may not send"),
    ],
)
def test_a_message_outside_the_framing_ends_the_stream(
    streams: Streams, sent: str | bytes, says: str
) -> None:
    user, node = streams.open()
    user.send(sent)
    reason = received_status(user)["reason"]
    assert (reason["code"], user.close_code) == ("bad_message", 1003)
    assert says in reason["message"]
    with pytest.raises(ConnectionClosed):
        node.recv(timeout=20)


def test_input_that_was_not_requested_ends_the_stream(streams: Streams) -> None:
    user, _node = streams.open(query=[("command", "sh")])
    user.send(message(Channel.STDIN, b"x"))
    assert "stdin=true" in received_status(user)["reason"]["message"]


def test_a_message_of_more_than_a_mebibyte_ends_the_connection(streams: Streams) -> None:
    user, _node = streams.open()
    user.send(message(Channel.STDIN, bytes(MIB)))
    with pytest.raises(ConnectionClosed):
        user.recv(timeout=20)
    assert user.close_code == 1009


def test_a_reader_that_stops_makes_the_node_wait(streams: Streams) -> None:
    user, node = streams.open()
    sent = 0
    node.socket.settimeout(3)
    with pytest.raises((TimeoutError, ConnectionClosed)):
        while sent < 1024 * MIB:
            node.send(message(Channel.STDOUT, bytes(64 * 1024)))
            sent += 64 * 1024
    # The buffers of both sockets, of both libraries, and of the replica.
    assert sent < 24 * MIB
    user.socket.close()


def test_a_node_cannot_make_the_replica_send_on_other_channels(streams: Streams) -> None:
    user, node = streams.open()
    for sent in (message(Channel.STDIN, b"a"), message(Channel.RESIZE, b"b"), message(Channel.CLOSE, b"c")):
        node.send(sent)
    node.send(b"\x77nonsense")
    assert received_status(user)["reason"]["code"] == "internal_error"


def test_a_stream_is_served_once(streams: Streams) -> None:
    user, node = streams.open()
    open_ids = streams.sandbox.service.service._server._context.streams.channels.ids
    with pytest.raises(InvalidStatus) as rejected:
        streams.sandbox.node.bring(open_ids[0])
    assert rejected.value.response.status_code == 404
    node.send(status(0))
    assert received_status(user)["exit_code"] == 0


def _ended_with(streams: Streams, user: ClientConnection, node: ClientConnection, code: str) -> None:
    assert received_status(user)["reason"]["code"] == code
    with pytest.raises(ConnectionClosed):
        node.recv(timeout=20)


def test_a_revoked_key_ends_its_stream(streams: Streams, shared: Client) -> None:
    key = shared.post("/v1/api-keys", json={"name": "stream", "role": "member"}).json()
    user, node = streams.open(key=key["key"])
    assert shared.delete(f"/v1/api-keys/{key['id']}").status_code == 204
    _ended_with(streams, user, node, "unauthorized")
    assert user.close_code == 1008


def test_a_key_without_the_scope_is_rejected(streams: Streams, shared: Client) -> None:
    key = shared.post("/v1/api-keys", json={"name": "viewer", "role": "viewer"}).json()
    assert rejection(streams, key=key["key"])[0] == 403


def test_a_deleted_instance_ends_its_stream_before_its_container_stops(streams: Streams) -> None:
    user, node = streams.open()
    assert streams.sandbox.client.delete(f"/v1/instances/{streams.instance_id}").status_code == 202
    _ended_with(streams, user, node, "instance_deleted")


def test_a_stream_whose_access_cannot_be_checked_ends(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a check had a bug."""

    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError

    user, node = streams.open()
    monkeypatch.setattr(control_streams, "ended_attempts", fail)
    monkeypatch.setattr(node_streams, "_CHECK_EVERY_S", 0)
    _ended_with(streams, user, node, "internal_error")


def test_a_revoked_reader_that_reads_nothing_is_disconnected(streams: Streams, shared: Client) -> None:
    key = shared.post("/v1/api-keys", json={"name": "stuck", "role": "member"}).json()
    _user, node = streams.open(key=key["key"])
    node.socket.settimeout(2)
    with pytest.raises((TimeoutError, ConnectionClosed)):
        while True:
            node.send(message(Channel.STDOUT, bytes(64 * 1024)))
    assert shared.delete(f"/v1/api-keys/{key['id']}").status_code == 204
    channels = streams.sandbox.service.service._server._context.streams.channels
    wait_until(lambda: len(channels) == 0, 3 * CLOSED_WITHIN_S)
    node.socket.close()
