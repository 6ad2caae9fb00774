"""Logs that the control plane relays from a node."""

import threading

import httpx
import pytest

from tests.api.conftest import Sandbox
from tests.api.streaming.conftest import Streams
from tests.nodes import output, status
from tests.testbed.waiting import wait_until

HOSTILE = "\x1b]0;title\x07safe\x1b[2J\u202egnp.exe\r\n" + "x" * 100_000


def test_a_followed_log_goes_on_after_a_delete_until_its_container_ends(streams: Streams) -> None:
    path = f"/v1/instances/{streams.instance_id}"
    answers: list[httpx.Response] = []
    client = streams.sandbox.client
    thread = threading.Thread(target=lambda: answers.append(client.get(f"{path}/logs?follow=true")))
    thread.start()
    with streams.sandbox.node.connect(streams.next_request().id) as node:
        node.send(output("2026-11-22T08:00:00Z first"))
        with streams.sandbox.service.client as other:
            assert other.delete(path).status_code == 202
        with pytest.raises(TimeoutError):
            node.recv(timeout=1)  # the stream stays open
        node.send(output("2026-11-22T08:00:01Z last"))
        node.send(status())
        thread.join(20)
    assert answers[0].text == "first\nlast\n"


def test_log_lines_of_a_node_are_sanitized_and_truncated(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path = f"/v1/instances/{assignment.instance_id}/logs"
    for accept in ("text/plain", "text/event-stream"):
        answers: list[httpx.Response] = []

        def get_logs(accept: str = accept, answers: list[httpx.Response] = answers) -> None:
            answers.append(sandbox.client.get(path, headers={"Accept": accept}))

        thread = threading.Thread(target=get_logs)
        thread.start()
        (stream,) = wait_until(sandbox.node.stream_requests)
        line = f"2026-11-22T08:00:00Z\ndata:forged {HOSTILE}"
        sandbox.node.bring(stream.id, output(line), status())
        thread.join(20)
        [answer] = answers
        assert "safegnp.exexxx" in answer.text
        assert not {"\x1b", "\u202e", "\r", "\x07"} & set(answer.text)
        assert max(map(len, answer.text.splitlines())) < 20_000
        assert "\ndata:forged" not in answer.text
