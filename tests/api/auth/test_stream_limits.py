"""Limits on open streams, and the end of a stream whose caller loses access."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from starlette.responses import StreamingResponse
from websockets.exceptions import ConnectionClosed

from mooring.api.context import Context
from mooring.auth.rate_limits import (
    STREAMS,
    STREAMS_PER_CALLER,
    STREAMS_PER_PROJECT,
    STREAMS_PER_PROJECT_AND_NODE,
    STREAMS_RESERVED_FOR_ADMINS,
    NodeStreams,
    OpenStreams,
)
from mooring.core.access import Caller, Permission
from mooring.schemas.agent import Assignment
from mooring_client.errors import TooManyRequests
from mooring_client.stream_messages import KEEPALIVE
from tests.api.conftest import Sandbox
from tests.nodes import output, status
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

EVENTS = {"Accept": "text/event-stream"}
# Rule R29 of docs/security.md.
CLOSED_WITHIN_S = 5.0


def new_key(admin: Client, **fields: Any) -> dict[str, Any]:
    answer = admin.post("/v1/api-keys", json={"name": "streams", "role": "member", **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def _open(service: RunningService) -> int:
    return len(_context(service).open_streams)


def _context(service: RunningService) -> Context:
    return service.service._server._context


def test_a_stream_over_the_callers_limit_is_rejected_until_another_ends(
    shared_service: RunningService, shared: Client
) -> None:
    limits = httpx.Limits(max_connections=100)
    headers = {"Authorization": f"Bearer {new_key(shared)['key']}"}
    with (
        httpx.Client(base_url=shared_service.url, headers=headers, limits=limits, timeout=20) as member,
        ExitStack() as streams,
    ):
        opened = [
            streams.enter_context(member.stream("GET", "/v1/events", headers=EVENTS))
            for _ in range(STREAMS_PER_CALLER)
        ]
        assert {answer.status_code for answer in opened} == {200}
        before = _open(shared_service)
        for _ in range(100):
            rejected = member.get("/v1/events", headers=EVENTS)
            assert problem(rejected, 429, "too_many_streams")["retryable"] is True
            assert int(rejected.headers["retry-after"]) >= 1
        problem(member.get("/v1/instances/ins_x/wait"), 429, "too_many_streams")
        problem(member.post("/v1/instances/ins_x/exec", json={"command": ["a"]}), 429, "too_many_streams")
        waits = {"image": "busybox", "name": "not-created"}
        problem(member.post("/v1/instances?wait=running", json=waits), 429, "too_many_streams")
        assert shared.items("/v1/instances", name="not-created") == []
        assert _open(shared_service) == before
        # Plain reads and other callers are not affected.
        assert member.get("/v1/me").status_code == 200
        with Client(shared_service.url, new_key(shared)["key"]) as other:
            assert other.get("/v1/events").status_code == 200
        opened[0].close()
        wait_until(lambda: member.get("/v1/events").status_code == 200)
    wait_until(lambda: _open(shared_service) == 0)


def test_every_ended_request_releases_its_stream_slot(shared_service: RunningService, shared: Client) -> None:
    wait_until(lambda: _open(shared_service) == 0)
    poll = f"/v1/events?wait_s=60&after={shared_service.newest_seq}"
    with Client(shared_service.url, new_key(shared)["key"]) as member:
        for _ in range(STREAMS_PER_CALLER + 1):
            problem(member.get("/v1/instances/ins_x/wait"), 404)
            problem(member.get("/v1/instances/ins_x/logs"), 404)
            problem(member.get("/v1/events?after=no"), 422)
            problem(member.post("/v1/instances/ins_x/exec", content=b"{"), 415)
            with pytest.raises(httpx.ReadTimeout):
                member.get(poll, timeout=0.01)
    wait_until(lambda: _open(shared_service) == 0)


def _caller(name: str, *, admin: bool = False, project: str | None = None) -> Caller:
    everywhere = frozenset({Permission.ADMIN} if admin else ())
    return Caller(name, "key", name, project_id=project, everywhere=everywhere)


def test_the_total_of_streams_is_limited_and_some_are_reserved_for_admins() -> None:
    slots = OpenStreams()
    with ExitStack() as held:
        for number in range(STREAMS):
            held.enter_context(slots.opened(_caller(f"key_{number // STREAMS_PER_CALLER}")))
        with pytest.raises(TooManyRequests, match="too many streams open"), slots.opened(_caller("another")):
            raise AssertionError
        for _ in range(STREAMS_RESERVED_FOR_ADMINS):
            held.enter_context(slots.opened(_caller("root", admin=True)))
        with pytest.raises(TooManyRequests), slots.opened(_caller("root", admin=True)):
            raise AssertionError
    assert len(slots) == 0
    with slots.opened(_caller("another")):
        assert len(slots) == 1


def test_the_streams_of_a_project_are_limited_over_all_its_keys() -> None:
    slots = OpenStreams()
    with ExitStack() as held:
        for number in range(STREAMS_PER_PROJECT):
            held.enter_context(slots.opened(_caller(f"key_{number}", project="a")))
        with (
            pytest.raises(TooManyRequests, match="your project"),
            slots.opened(_caller("more", project="a")),
        ):
            raise AssertionError
        with slots.opened(_caller("other", project="b")), slots.opened(_caller("person")):
            assert len(slots) == STREAMS_PER_PROJECT + 2
    with slots.opened(_caller("more", project="a")):
        assert len(slots) == 1


def test_the_streams_of_a_project_on_a_node_are_limited_and_admins_do_not_count() -> None:
    slots = NodeStreams()
    with ExitStack() as held:
        for _ in range(STREAMS_PER_PROJECT_AND_NODE):
            held.enter_context(slots.opened("node", "a"))
        with pytest.raises(TooManyRequests, match="close one of them") as caught, slots.opened("node", "a"):
            raise AssertionError
        assert caught.value.code == "too_many_streams_on_node"
        with slots.opened("node", "b"), slots.opened("another", "a"):
            assert len(slots) == STREAMS_PER_PROJECT_AND_NODE + 2
        with slots.opened("node", "a", is_admin=True):
            assert len(slots) == STREAMS_PER_PROJECT_AND_NODE
    assert len(slots) == 0


class StreamingNode:
    """A node that sends one stream until the replica closes it: one line, then keepalives."""

    def __init__(self, sandbox: Sandbox, stream_id: str) -> None:
        self._done = threading.Event()
        self._stream_id, self._node_id = stream_id, sandbox.node.id
        self._channels = _context(sandbox.service).streams.channels
        self._thread = threading.Thread(target=self._run, args=(sandbox, stream_id))
        self._thread.start()

    def _run(self, sandbox: Sandbox, stream_id: str) -> None:
        with sandbox.node.connect(stream_id) as stream, suppress(ConnectionClosed):
            stream.send(output("2026-01-01T00:00:00Z begun"))
            while not self._done.wait(0.1):
                stream.send(KEEPALIVE)
            stream.send(status())

    def finish(self) -> None:
        """End the stream on the node's side."""
        self._done.set()

    def end(self) -> None:
        """Wait until the stream has no reader, and the replica has closed the connection."""
        wait_until(lambda: self._channels.find(self._stream_id, self._node_id) is None)
        self._thread.join(20)
        assert not self._thread.is_alive()


class Request:
    """A request in a thread of its own; records the start of its answer, its result and its end."""

    def __init__(self, service: RunningService, key: str, method: str, path: str, **more: Any) -> None:
        self.begun = threading.Event()
        self.status = 0
        self.text = ""
        self.ended_at = 0.0
        self._client = Client(service.url, key)
        self._thread = threading.Thread(target=self._run, args=(method, path), kwargs=more)
        self._thread.start()

    def _run(self, method: str, path: str, **more: Any) -> None:
        with self._client as client, client.stream(method, path, **more) as answer:
            self.status = answer.status_code
            for text in answer.iter_text():
                self.text += text
                self.begun.set()
        self.ended_at = time.monotonic()

    def end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


OpenStream = Callable[..., tuple[Request, StreamingNode | None]]


@pytest.fixture
def open_stream(shared_service: RunningService, sandbox: Sandbox) -> OpenStream:
    """Sends a request of this kind with this key; returns it with the node's side, if a node serves it."""
    assignment: Assignment = sandbox.running()
    instance = f"/v1/instances/{assignment.instance_id}"
    newest = shared_service.newest_seq
    command = {"json": {"command": ["sleep"], "timeout_s": 60}}
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "events": ("GET", "/v1/events?after=0", {"headers": EVENTS}),
        "poll": ("GET", f"/v1/events?after={newest}&wait_s=60", {}),
        "short poll": ("GET", f"/v1/events?after={newest}&wait_s=4.5", {}),
        "wait": ("GET", f"{instance}/wait?state=stopped&timeout_s=60", {}),
        "logs": ("GET", f"{instance}/logs?follow=true", {}),
        "logs-sse": ("GET", f"{instance}/logs?follow=true", {"headers": EVENTS}),
        "exec": ("POST", f"{instance}/exec", command),
    }
    taken: set[str] = set()

    def opened(kind: str, key: str) -> tuple[Request, StreamingNode | None]:
        method, path, more = kinds[kind]
        request = Request(shared_service, key, method, path, **more)
        if path.startswith("/v1/events") or kind == "wait":
            return request, None
        return request, StreamingNode(sandbox, wait_until(next_stream))

    def next_stream() -> str | None:
        for stream in sandbox.node.stream_requests():
            if stream.id not in taken:
                taken.add(stream.id)
                return stream.id
        return None

    return opened


KINDS = ("events", "poll", "wait", "logs", "logs-sse", "exec")


def test_a_stream_over_the_nodes_limit_is_rejected_before_it_reaches_the_node(
    shared_service: RunningService, shared: Client, sandbox: Sandbox, open_stream: OpenStream
) -> None:
    """The limit holds for the instance's project, over all its keys."""
    keys = [new_key(shared)["key"] for _ in range(2)]
    open_ = [open_stream("logs", keys[number % 2]) for number in range(STREAMS_PER_PROJECT_AND_NODE)]
    for request, _ in open_:
        assert request.begun.wait(10)
    instance = f"/v1/instances/{sandbox.reported[0].instance_id}"
    with Client(shared_service.url, new_key(shared)["key"]) as another:
        rejected = another.get(f"{instance}/logs")
        assert problem(rejected, 429, "too_many_streams_on_node")["retryable"] is True
        assert int(rejected.headers["retry-after"]) >= 1
        again = {"Idempotency-Key": "exec-1"}
        for _ in range(2):  # no command ran, so the key stays unused
            answer = another.post(f"{instance}/exec", json={"command": ["a"]}, headers=again)
            problem(answer, 429, "too_many_streams_on_node")
    for request, streaming in open_:
        assert streaming is not None
        streaming.finish()
        request.end()
        streaming.end()
    wait_until(lambda: len(_context(shared_service).node_streams) == 0)
    last, streaming = open_stream("logs", keys[0])
    assert last.begun.wait(10)
    assert streaming is not None
    streaming.finish()
    last.end()
    streaming.end()


def test_open_requests_end_within_five_seconds_of_their_keys_revocation(
    shared_service: RunningService, shared: Client, open_stream: OpenStream
) -> None:
    keys = {kind: new_key(shared) for kind in KINDS}
    bystander, _ = open_stream("short poll", new_key(shared)["key"])
    open_ = {kind: open_stream(kind, key["key"]) for kind, key in keys.items()}
    for kind in ("events", "logs", "logs-sse"):
        assert open_[kind][0].begun.wait(10), kind
    wait_until(lambda: _open(shared_service) == len(KINDS) + 1)
    for key in keys.values():
        assert shared.delete(f"/v1/api-keys/{key['id']}").status_code == 204
    revoked_at = time.monotonic()
    for kind, (request, streaming) in open_.items():
        request.end()
        assert request.ended_at - revoked_at < CLOSED_WITHIN_S, kind
        if streaming is not None:
            streaming.end()
        if kind in {"poll", "wait", "exec"}:
            assert (request.status, json.loads(request.text)["code"]) == (401, "unauthorized"), kind
    assert '"error":{"code":"unauthorized"' in open_["events"][0].text.splitlines()[-2]
    assert '"error":{"code":"unauthorized"' in open_["logs-sse"][0].text.splitlines()[-2]
    assert open_["logs"][0].text.splitlines()[0] == "begun"
    assert "interrupted: the API key is unknown, revoked or expired" in open_["logs"][0].text.splitlines()[-1]
    bystander.end()
    assert bystander.status == 200
    wait_until(lambda: _open(shared_service) == 0)


def _last_seq(client: Client) -> int:
    """The sequence number of the newest event."""
    last = -1
    while (newer := int(client.get(f"/v1/events?after={max(0, last)}").json()["last_seq"])) != last:
        last = newer
    return last


def test_a_paused_poll_checks_access_again_before_it_answers(
    shared_service: RunningService, shared: Client
) -> None:
    """With many streams in its project, a poll pauses before it reads more events.

    The pause here is 2.5 s, longer than an access decision is cached.
    """
    project = shared.items("/v1/projects")[0]["id"]
    key, context = new_key(shared), _context(shared_service)
    path = f"/v1/events?wait_s=20&after={_last_seq(shared)}"
    wait_until(lambda: not context.event_pages._cached)
    with ExitStack() as held:
        for number in range(250):
            held.enter_context(context.open_streams.opened(_caller(f"key_{number}", project=project)))
        poll = Request(shared_service, key["key"], "GET", path)
        wait_until(lambda: context.event_pages._cached)  # the poll has found no event and waits
        shared.create(gpus={"count": 64})
        assert shared.delete(f"/v1/api-keys/{key['id']}").status_code == 204
        poll.end()
    assert (poll.status, json.loads(poll.text)["code"]) == (401, "unauthorized")


def _member(shared: Client, name: str, role: str = "member") -> dict[str, Any]:
    """A user in the default project with a personal key.

    Returns the key, and the paths of the user (`user`) and of their membership (`member`).
    """
    user = shared.post("/v1/users", json={"name": name, "email": f"{name}-{time.monotonic_ns()}@example.org"})
    assert user.status_code == 201, user.text
    project = shared.items("/v1/projects")[0]["id"]
    path = f"/v1/projects/{project}/members/{user.json()['id']}"
    assert shared.put(path, json={"role": role}).status_code == 200
    key = new_key(shared, user_id=user.json()["id"], project_id=project)
    return {"member": path, "user": f"/v1/users/{user.json()['id']}", **key}


def test_losing_a_role_ends_the_streams_that_need_it(
    shared_service: RunningService, shared: Client, open_stream: OpenStream
) -> None:
    removed, narrowed, deleted = (_member(shared, name) for name in ("removed", "narrowed", "deleted"))
    logs, logs_node = open_stream("logs", removed["key"])
    events, _ = open_stream("events", deleted["key"])
    admin = _member(shared, "admin")
    assert shared.patch(admin["user"], json={"is_admin": True}).status_code == 200
    assert shared.delete(admin["member"]).status_code == 204
    demoted, _ = open_stream("events", new_key(shared, user_id=admin["user_id"])["key"])
    command, exec_node = open_stream("exec", narrowed["key"])
    remaining, remaining_node = open_stream("logs", narrowed["key"])
    assert logs.begun.wait(10)
    assert remaining.begun.wait(10)
    wait_until(lambda: _open(shared_service) == 5)
    assert shared.delete(removed["member"]).status_code == 204
    assert shared.put(narrowed["member"], json={"role": "viewer"}).status_code == 200
    assert shared.delete(deleted["user"]).status_code == 204
    assert shared.patch(admin["user"], json={"is_admin": False}).status_code == 200
    lost_at = time.monotonic()
    for request in (logs, events, demoted, command):
        request.end()
        assert request.ended_at - lost_at < CLOSED_WITHIN_S
    assert "interrupted" in logs.text
    assert '"error":{"code":"unauthorized"' in events.text
    assert '"error":{"code":"forbidden"' in demoted.text
    assert (command.status, json.loads(command.text)["code"]) == (403, "forbidden")
    # A viewer may still read logs.
    assert remaining.ended_at == 0.0
    assert remaining_node is not None
    remaining_node.finish()
    for node in (logs_node, exec_node, remaining_node):
        assert node is not None
        node.end()
    remaining.end()
    assert "interrupted" not in remaining.text
    wait_until(lambda: _open(shared_service) == 0)


def test_a_reader_that_disconnects_before_the_first_byte_leaves_no_open_stream(
    shared_service: RunningService, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def disconnect(*_of_asgi: Any) -> None:
        raise OSError("the reader is gone")

    monkeypatch.setattr(StreamingResponse, "__call__", disconnect)
    assignment = sandbox.running()
    path = f"/v1/instances/{assignment.instance_id}/logs?follow=true"
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(sandbox.client.get(path).status_code))
    thread.start()
    (stream,) = wait_until(sandbox.node.stream_requests)
    streaming = StreamingNode(sandbox, stream.id)
    thread.join(20)
    assert answers == [500]
    streaming.end()
    assert _open(shared_service) == 0
