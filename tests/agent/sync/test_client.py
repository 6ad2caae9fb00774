"""The node's calls, against a real HTTP server."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from mooring.agent.sync.client import (
    SESSION_CALL,
    ControlPlaneClient,
    CredentialRejected,
    InsecureUrl,
    RequestRejected,
    SessionTaken,
    Unreachable,
    sync_call,
)
from mooring.agent.sync.identity import NodeIdentity
from mooring.core.node import NodeFacts
from mooring.schemas.agent import SyncAnswer, SyncRequest
from mooring_client.stream_messages import KEEPALIVE
from tests.agent.builders import assignment
from tests.agent.control_planes import CREDENTIAL, OWN, TOKEN, TinyControlPlane, control_plane
from tests.testbed.waiting import wait_until

FACTS = NodeFacts(hostname="h", address="10.0.0.7", cpus=1, memory_mib=1024, agent_version="0")
REPORT = SyncRequest(session=1, seq=1, generation=0, facts=FACTS, gpus=None, instances=None)


@pytest.fixture
def server() -> Iterator[TinyControlPlane]:
    with control_plane() as made:
        yield made


@pytest.fixture
def client(server: TinyControlPlane) -> Iterator[ControlPlaneClient]:
    made = ControlPlaneClient(server.url)
    made.identify(NodeIdentity.from_answer(made.join(TOKEN, "gpu-1", "host-1", OWN), OWN))
    yield made
    made.close()


def test_a_node_joins_opens_a_session_and_syncs(server: TinyControlPlane, client: ControlPlaneClient) -> None:
    server.wants(assignment())
    assert client.call(SESSION_CALL).session == 1
    answer = client.call(sync_call(REPORT))
    assert answer.assignments == server.assignments
    assert server.last() == REPORT


def test_a_wrong_token_is_rejected(server: TinyControlPlane) -> None:
    made = ControlPlaneClient(server.url)
    with pytest.raises(CredentialRejected):
        made.join("guessed", "gpu-1", "host-1", OWN)
    made.close()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, "unauthorized", CredentialRejected),
        (409, "stale_session", SessionTaken),
        (409, "conflict", RequestRejected),
        (403, "forbidden", RequestRejected),
        (422, "validation_failed", Unreachable),
        (429, "too_many_requests", Unreachable),
        (500, "internal_error", Unreachable),
        (503, "database_unavailable", Unreachable),
    ],
)
def test_the_exception_of_each_error(
    server: TinyControlPlane, client: ControlPlaneClient, status: int, code: str, error: type[Exception]
) -> None:
    server.failure = (status, code)
    with pytest.raises(error) as raised:
        client.call(sync_call(REPORT))
    assert type(raised.value) is error
    assert CREDENTIAL not in str(raised.value)


def test_no_answer_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        made = ControlPlaneClient(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(Unreachable, match="ConnectError"):
            made.call(SESSION_CALL)
        made.close()


def test_fields_of_a_newer_release_are_ignored_also_inside_a_spec(
    server: TinyControlPlane, client: ControlPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.wants(assignment())
    newer = json.loads(server.sync(REPORT).model_dump_json())
    newer["invented_later"] = newer["assignments"][0]["spec"]["invented_later"] = 1
    monkeypatch.setattr(SyncAnswer, "model_dump_json", lambda _: json.dumps(newer))
    assert client.call(sync_call(REPORT)).assignments == server.assignments


def test_an_invalid_answer_is_an_error_that_does_not_contain_environment_variables(
    server: TinyControlPlane, client: ControlPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SyncAnswer, "model_dump_json", lambda _: '{"assignments": [{"spec": "env-canary"}]}')
    with pytest.raises(Unreachable, match="not a valid SyncAnswer") as raised:
        client.call(sync_call(REPORT))
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8700", "http://localhost:8700", "http://[::1]:1", "https://m.example"]
)
def test_loopback_and_https_urls_are_accepted(url: str) -> None:
    ControlPlaneClient(url).close()


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7:8700", "http://m.example", "ftp://m.example", "m.example:8700", ""]
)
def test_insecure_and_invalid_urls_are_rejected(url: str) -> None:
    with pytest.raises(InsecureUrl):
        ControlPlaneClient(url)


def test_plain_http_to_another_machine_needs_insecure_http() -> None:
    ControlPlaneClient("http://10.0.0.7:8700", insecure_http=True).close()


def test_a_stream_does_not_send_the_credential_unencrypted(client: ControlPlaneClient) -> None:
    with pytest.raises(InsecureUrl):
        client.stream_connection("str_1", "http://10.0.0.7:8700")


def test_a_stream_is_opened_with_the_nodes_credential(
    server: TinyControlPlane, client: ControlPlaneClient
) -> None:
    async def send() -> None:
        async with client.stream_connection("str_1", server.receiver.url) as stream:
            await stream.send(KEEPALIVE)

    asyncio.run(send())
    received = server.receiver.stream("str_1")
    assert received.authorization == f"Bearer {CREDENTIAL}"
    wait_until(lambda: received.keepalives == 1)


def test_a_stream_that_nobody_waits_for_is_an_error(
    server: TinyControlPlane, client: ControlPlaneClient
) -> None:
    async def send() -> None:
        async with client.stream_connection("str_1", server.url):
            raise AssertionError

    with pytest.raises(InvalidStatus):
        asyncio.run(send())


def test_a_stream_follows_no_redirect(client: ControlPlaneClient) -> None:
    """It would send the credential to another place."""
    requests: list[str] = []

    def redirect(connection: ServerConnection, request: Request) -> Response:
        requests.append(request.path)
        return Response(302, "Found", Headers({"Location": "/elsewhere", "Content-Length": "0"}), b"")

    async def send(port: int) -> None:
        async with client.stream_connection("str_1", f"http://127.0.0.1:{port}"):
            raise AssertionError

    with serve(lambda _connection: None, "127.0.0.1", 0, process_request=redirect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(InvalidStatus):
            asyncio.run(send(server.socket.getsockname()[1]))
        server.shutdown()
        thread.join()
    assert requests == ["/agent/v1/streams/str_1"]
