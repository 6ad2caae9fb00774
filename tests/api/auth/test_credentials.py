"""What API keys and node credentials give access to, the end of keys, and how keys are stored."""

import threading
from datetime import timedelta
from secrets import token_urlsafe

import httpx
import pytest
from sqlalchemy import select, update
from websockets.exceptions import InvalidStatus

from mooring.auth.credentials import CACHED_S
from mooring.core import credentials, ids
from mooring.db.tables import ApiKey
from mooring.db.types import new_id, now
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, output, status
from tests.problems import problem
from tests.service import ADMIN_KEY, Client, RunningService
from tests.testbed.waiting import wait_until


def make_key(service: RunningService, *scopes: str, **fields: object) -> str:
    """A key written directly to the database; without an admin scope it belongs to the default project."""
    secret = f"mk_{token_urlsafe(32)}"
    of_project = not {"admin", "metrics:read"} & set(scopes)
    with service.plane.database.write() as session:
        session.add(
            ApiKey(
                **{
                    "id": new_id(ids.API_KEY),
                    "name": "test",
                    "prefix": secret[:9],
                    "project_id": service.plane.identity.default_project_id if of_project else None,
                    "scopes": list(scopes),
                    "secret_hash": credentials.hashed(secret),
                    "created_at": now(),
                    **fields,
                }
            )
        )
    return secret


def test_node_credentials_and_api_keys_cannot_call_each_others_paths(sandbox: Sandbox) -> None:
    document = sandbox.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            filled = path.replace("{", "").replace("}", "")
            if path.startswith("/v1") or path == "/metrics":
                answer = sandbox.node.http.request(method, filled, json=None if method == "get" else {})
                problem(answer, 401, "unauthorized")
            elif path.startswith("/agent/") and path != "/agent/v1/join":  # a join needs no credential
                answer = sandbox.client.request(method, filled, json=None if method == "get" else {})
                problem(answer, 401, "unauthorized")


def test_a_node_cannot_answer_an_unknown_stream(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidStatus) as rejected:
        sandbox.node.bring("str_none")
    assert rejected.value.response.status_code == 404


def test_a_node_cannot_answer_another_nodes_stream(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    thief = WireNode(sandbox.client, f"eaves-{sandbox.node.name}")
    answers: list[httpx.Response] = []
    path = f"/v1/instances/{assignment.instance_id}/exec"
    thread = threading.Thread(
        target=lambda: answers.append(sandbox.client.post(path, json={"command": ["id"]}))
    )
    thread.start()
    (stream,) = wait_until(sandbox.node.stream_requests)
    with pytest.raises(InvalidStatus) as rejected:
        thief.bring(stream.id)
    assert rejected.value.response.status_code == 404
    assert thief.stream_requests() == []
    sandbox.node.bring(stream.id, output("root\n"), status(0))
    thread.join(20)
    assert answers[0].json() == {"exit_code": 0, "stdout": "root\n", "stderr": "", "truncated": False}
    sandbox.client.delete(f"/v1/nodes/{thief.id}")
    thief.close()


@pytest.mark.parametrize("change", ["revoked_at", "expires_at"])
def test_a_revoked_or_expired_key_stops_working_within_a_second(
    shared_service: RunningService, change: str
) -> None:
    secret = make_key(shared_service, "admin")
    with Client(shared_service.url, key=secret) as caller:
        assert caller.get("/v1/instances").status_code == 200
        with shared_service.plane.database.write() as session:
            session.execute(
                update(ApiKey)
                .where(ApiKey.secret_hash == credentials.hashed(secret))
                .values({change: now() - timedelta(seconds=1)})
            )
        wait_until(lambda: caller.get("/v1/instances").status_code == 401, timeout_s=CACHED_S + 0.5)
        problem(caller.get("/v1/instances"), 401, "unauthorized")


def test_members_cannot_change_nodes_or_read_metrics(
    shared_service: RunningService, sandbox: Sandbox
) -> None:
    with Client(shared_service.url, key=make_key(shared_service, "instances:write")) as member:
        node, gpu = f"/v1/nodes/{sandbox.node.id}", f"/v1/gpus/{sandbox.node.gpus[0].uuid}"
        for path in (f"{node}/cordon", f"{node}/uncordon", f"{node}/drain", f"{gpu}/clear"):
            problem(member.post(path), 403, "forbidden")
        problem(member.post("/v1/join-tokens", json={}), 403, "forbidden")
        problem(member.delete(node), 403, "forbidden")
        problem(member.get("/metrics"), 403, "forbidden")
    assert sandbox.client.get(node).json()["state"] == "ready"


def test_keys_are_stored_as_hashes_with_their_last_use(
    shared_service: RunningService, shared: Client
) -> None:
    shared.get("/v1/instances")
    with shared_service.plane.database.read() as session:
        row = session.scalars(select(ApiKey).where(ApiKey.secret_hash == credentials.hashed(ADMIN_KEY))).one()
        assert ADMIN_KEY not in {row.secret_hash, row.name, row.id}
        assert row.last_used_at is not None
        assert row.last_used_at > now() - timedelta(minutes=5)
