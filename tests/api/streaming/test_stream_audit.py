"""The audit log of streams: one row for each, with what was requested and how it ended, never its content."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from websockets.exceptions import ConnectionClosed

from mooring.db.tables import Stream
from mooring.db.types import now
from mooring_client.stream_messages import Channel, message
from tests.api.streaming.conftest import Streams
from tests.nodes import output, status
from tests.retention import purge
from tests.testbed.waiting import wait_until

SECRET = "canary-of-a-stream"


def rows_of(streams: Streams) -> list[dict[str, Any]]:
    """The rows of the instance's streams, newest first."""
    found = streams.sandbox.client.items("/v1/audit-log", target_id=streams.instance_id)
    return [row for row in found if row["action"] in {"instance.exec", "instance.port"}]


def row_of(streams: Streams) -> dict[str, Any]:
    [row] = wait_until(lambda: rows_of(streams))
    return dict(row)


def test_a_command_is_recorded_with_its_outcome_and_without_its_content(streams: Streams) -> None:
    query = [
        ("command", "sh"),
        ("command", "-c"),
        ("command", "id"),
        ("stdin", "true"),
        ("env", f"TOKEN={SECRET}"),
    ]
    user, node = streams.open(query=query)
    user.send(message(Channel.STDIN, SECRET.encode()))
    node.recv(timeout=20)
    node.send(output(SECRET))
    node.send(output("ab", Channel.STDERR))
    assert rows_of(streams) == []  # the row is written at the end
    with streams.sandbox.service.plane.database.read() as session:
        assert SECRET not in json.dumps(session.scalars(select(Stream.request)).all())
    node.send(status(4))
    row = row_of(streams)
    assert row["actor"]["kind"] == "key"
    assert row["address"] == "127.0.0.1"
    after = row["after"]
    assert 0 <= after.pop("duration_s") < 60
    assert after == {
        "command": ["sh", "-c", "id"], "tty": False, "user": None, "env": ["TOKEN"], "bytes_in": len(SECRET),
        "bytes_out": len(SECRET) + 2, "exit_code": 4, "reason": None,
    }  # fmt: skip
    assert SECRET not in json.dumps(row)


def test_a_collected_command_is_recorded_the_same(streams: Streams) -> None:
    path = f"/v1/instances/{streams.instance_id}/exec"
    body = {"command": ["id"]}
    thread = threading.Thread(target=lambda: streams.sandbox.client.post(path, json=body))
    thread.start()
    streams.sandbox.node.bring(streams.next_request().id, output("root"), status(0))
    thread.join(20)
    after = row_of(streams)["after"]
    assert (after["command"], after["bytes_out"], after["exit_code"]) == (["id"], 4, 0)


def test_a_connection_is_recorded_with_its_port(streams: Streams) -> None:
    user, _node = streams.open("ports/80/stream", [], subprotocols=("tcp",))
    user.send(b"x" * 100)
    user.close()
    row = row_of(streams)
    assert row["action"] == "instance.port"
    assert (row["after"]["port"], row["after"]["reason"]) == (80, "client_ended")


def test_a_command_that_never_ran_is_recorded_with_the_reason(streams: Streams) -> None:
    path = f"/v1/instances/{streams.instance_id}/exec"
    thread = threading.Thread(target=lambda: streams.sandbox.client.post(path, json={"command": ["id"]}))
    thread.start()
    streams.sandbox.node.bring(streams.next_request().id, status(code="not_running"))
    thread.join(20)
    assert row_of(streams)["after"]["reason"] == "not_running"


def test_a_stream_whose_server_has_ended_is_recorded_once(streams: Streams) -> None:
    user, node = streams.open()
    database = streams.sandbox.service.plane.database
    with database.write() as session:
        session.execute(update(Stream).values(seen_at=now() - timedelta(hours=1)))
    # The server has not ended here, but the row looks as if it had.
    purge(streams.sandbox.service)
    after = row_of(streams)["after"]
    assert (after["command"], after["bytes_in"], after["reason"]) == (["sh"], None, "server_lost")
    node.send(status(0))
    with pytest.raises(ConnectionClosed):
        while True:
            user.recv(timeout=20)
    assert len(rows_of(streams)) == 1
