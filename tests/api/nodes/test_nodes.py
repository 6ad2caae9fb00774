"""Nodes: joining, sessions, cordon, drain and deletion."""

import threading
from collections import Counter
from copy import copy
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import select, update

from mooring.control.nodes import joins, nodes
from mooring.core import credentials
from mooring.core.access import on_host
from mooring.db.signals import Topic
from mooring.db.tables import JoinToken, Node
from mooring.db.types import now
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import join_token, observed
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until
from tests.waiters import waiters


def _post_join(
    client: Client, token: str, name: str | None = None, credential: str | None = None
) -> httpx.Response:
    body = {"token": token, "node_name": name, "hostname": "host"}
    if credential is not None:
        body["credential_hash"] = credentials.hashed(credential)
    return httpx.post(f"{client.base_url}/agent/v1/join", json=body, timeout=60)


def test_one_of_fifty_concurrent_joins_with_one_token_succeeds(shared: Client) -> None:
    token = join_token(shared, node_name="raced")
    answers = run_concurrently(50, lambda number: _post_join(shared, token, f"raced-{number}"))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 401: 49}
    assert [item["name"] for item in shared.items("/v1/nodes", name="raced")] == ["raced"]


def test_one_of_several_concurrent_joins_with_one_name_succeeds(shared: Client) -> None:
    tokens = [join_token(shared) for _ in range(8)]
    answers = run_concurrently(8, lambda number: _post_join(shared, tokens[number], "same"))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 7}
    for answer in answers:
        if answer.status_code == 409:
            problem(answer, 409, "node_name_taken")


def test_a_used_wrong_or_expired_token_is_rejected(shared_service: RunningService, shared: Client) -> None:
    used = join_token(shared)
    assert _post_join(shared, used, "first").status_code == 201
    expired = join_token(shared, ttl_s=60)
    with shared_service.plane.database.write() as session:
        session.execute(
            update(JoinToken)
            .where(JoinToken.secret_hash == credentials.hashed(expired))
            .values(expires_at=now() - timedelta(seconds=1))
        )
    details = {
        problem(_post_join(shared, token, "late"), 401, "unauthorized")["detail"]
        for token in (used, expired, "mj_wrong", "", used + "x")
    }
    assert len(details) == 1  # the answer does not show the cause
    assert shared.items("/v1/nodes", name="late") == []


def test_a_repeated_join_returns_the_same_node(shared_service: RunningService, shared: Client) -> None:
    token = join_token(shared)
    first = _post_join(shared, token, "repeats", "own-credential-1")
    assert (first.status_code, first.json()["credential"]) == (201, "")
    for again in (token, join_token(shared)):  # the operator may give it a new token
        answer = _post_join(shared, again, "repeats", "own-credential-1")
        assert (answer.status_code, answer.json()) == (201, first.json())
    with shared_service.plane.database.write() as session:
        past = now() - timedelta(seconds=1)
        session.execute(update(JoinToken).values(expires_at=past))
    assert _post_join(shared, token, "repeats", "own-credential-1").json() == first.json()
    opened = httpx.post(
        f"{shared.base_url}/agent/v1/session", headers={"Authorization": "Bearer own-credential-1"}
    )
    assert opened.json()["node_id"] == first.json()["node_id"]


def test_a_used_token_is_of_use_only_to_its_node(shared: Client) -> None:
    token = join_token(shared)
    assert _post_join(shared, token, "owner", "own-credential-2").status_code == 201
    problem(_post_join(shared, token, "owner", "own-credential-3"), 401, "unauthorized")
    problem(_post_join(shared, token, "other"), 401, "unauthorized")
    problem(_post_join(shared, "mj_wrong", "owner", "own-credential-2"), 401, "unauthorized")
    # The token of another node.
    other = join_token(shared)
    assert _post_join(shared, other, "other", "own-credential-4").status_code == 201
    problem(_post_join(shared, other, "owner", "own-credential-2"), 401, "unauthorized")
    # The name alone does not make a machine the node.
    problem(_post_join(shared, join_token(shared), "owner", "own-credential-3"), 409, "node_name_taken")


def test_only_the_node_of_mooring_up_may_join_again(shared_service: RunningService, shared: Client) -> None:
    def token(*, local: bool) -> str:
        with shared_service.plane.database.write() as session:
            access = on_host("join_token.create")
            return joins.create_join_token(session, access, 60, None, local=local)[1]

    first = _post_join(shared, token(local=True), "local", "own-credential-5").json()
    problem(_post_join(shared, token(local=False), "local", "own-credential-6"), 409, "node_name_taken")
    again = _post_join(shared, token(local=True), "local", "own-credential-6")
    assert again.json() == first
    for credential, status in (("own-credential-5", 401), ("own-credential-6", 200)):
        headers = {"Authorization": f"Bearer {credential}"}
        assert httpx.post(f"{shared.base_url}/agent/v1/session", headers=headers).status_code == status
    assert _post_join(shared, token(local=False), "remote", "own-credential-7").status_code == 201
    problem(_post_join(shared, token(local=True), "remote", "own-credential-8"), 409, "node_name_taken")


@pytest.mark.parametrize("value", ["", "x", "A" * 64, "0" * 63, "0" * 65])
def test_a_hash_of_another_form_is_rejected(shared: Client, value: str) -> None:
    body = {"token": join_token(shared), "node_name": "n", "hostname": "h", "credential_hash": value}
    problem(httpx.post(f"{shared.base_url}/agent/v1/join", json=body), 422, "validation_failed")


def test_a_tokens_secret_is_not_in_the_database(shared_service: RunningService, shared: Client) -> None:
    token = join_token(shared)
    with shared_service.plane.database.read() as session:
        stored = [row.secret_hash for row in session.scalars(select(JoinToken))]
        assert credentials.hashed(token) in stored
        assert token not in stored
        assert all(len(row.credential_hash) == 64 for row in session.scalars(select(Node)))


def test_the_name_in_the_token_takes_precedence(shared: Client) -> None:
    joined = _post_join(shared, join_token(shared, node_name="fixed"), "wished").json()
    assert joined["node_name"] == "fixed"
    assert shared.get(f"/v1/nodes/{joined['node_id']}").json()["name"] == "fixed"
    problem(_post_join(shared, join_token(shared)), 409, "node_name_missing")


def test_a_join_with_a_name_in_use_does_not_use_up_the_token(shared: Client) -> None:
    first = _post_join(shared, join_token(shared), "unique").json()
    token = join_token(shared)
    problem(_post_join(shared, token, "unique"), 409, "node_name_taken")
    shared.delete(f"/v1/nodes/{first['node_id']}")
    second = _post_join(shared, token, "unique")
    assert second.status_code == 201
    assert second.json()["node_id"] != first["node_id"]


@pytest.mark.parametrize(
    "body", [{"ttl_s": 0}, {"ttl_s": 86_401}, {"ttl_s": 1.5}, {"node_name": "A b"}, {"x": 1}]
)
def test_an_invalid_join_token_request_is_rejected(shared: Client, body: dict[str, object]) -> None:
    problem(shared.post("/v1/join-tokens", json=body), 422, "validation_failed")


def test_a_node_that_has_not_reported_is_unreachable_and_gets_no_instances(client: Client) -> None:
    joined = _post_join(client, join_token(client), "quiet").json()
    shown = client.get(f"/v1/nodes/{joined['node_id']}").json()
    assert (shown["state"], shown["reason"]["code"]) == ("unreachable", "never_heard")
    assert (shown["hostname"], shown["cpus_free"], shown["last_heartbeat_at"]) == (None, None, None)
    made = client.create()
    wait_until(lambda: client.instance(made["id"])["reason"]["code"] == "no_nodes")


def test_the_first_report_makes_a_node_ready(sandbox: Sandbox) -> None:
    shown = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert (shown["state"], shown["reason"]) == ("ready", None)
    assert (shown["cpus"], shown["cpus_free"], shown["memory_mib"]) == (64, 64, 524_288)
    assert shown["memory_mib_free"] == 524_288 - 524_288 // 50
    assert shown["versions"] == {"agent": "0.1.0", "docker": "20.10.24", "driver": None, "cuda": None}
    assert [gpu["index"] for gpu in shown["gpus"]] == list(range(8))
    assert {gpu["health"] for gpu in shown["gpus"]} == {"healthy"}
    sandbox.running(gpus={"count": 2})
    used = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert used["cpus_free"] == 48
    assert [gpu["instance_id"] for gpu in used["gpus"]].count(None) == 6


def test_a_node_with_a_problem_gets_no_instances(sandbox: Sandbox) -> None:
    sandbox.sync(problem={"code": "docker_unavailable", "message": "no docker"})
    shown = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert (shown["state"], shown["reason"]["code"]) == ("not_ready", "docker_unavailable")
    made = sandbox.create()
    wait_until(lambda: sandbox.client.instance(made["id"])["reason"]["code"] == "waiting_for_capacity")
    sandbox.sync()
    sandbox.client.wait(made["id"], "scheduled")


def test_a_cordoned_node_keeps_its_instances_and_gets_no_new_ones(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path = f"/v1/nodes/{sandbox.node.id}"
    cordoned = sandbox.client.post(f"{path}/cordon").json()
    assert (cordoned["state"], cordoned["cordoned"]) == ("cordoned", True)
    made = sandbox.create()
    wait_until(lambda: sandbox.client.instance(made["id"])["reason"]["code"] == "waiting_for_capacity")
    assert "cordoned" in sandbox.client.instance(made["id"])["reason"]["message"]
    assert sandbox.sync(observed(assignment, "running")).assignments[0].want == "running"
    assert sandbox.client.post(f"{path}/uncordon").json()["state"] == "ready"
    sandbox.client.wait(made["id"], "scheduled")


def test_a_node_with_instances_is_deleted_only_by_force(sandbox: Sandbox) -> None:
    running, deleted = sandbox.running(gpus={"count": 1}), sandbox.running(gpus={"count": 1})
    sandbox.client.delete(f"/v1/instances/{deleted.instance_id}")
    path = f"/v1/nodes/{sandbox.node.id}"
    assert problem(sandbox.client.delete(path), 409, "node_in_use")["instances"] == 2
    assert sandbox.client.delete(path, params={"force": True}).status_code == 204
    problem(sandbox.client.get(path), 404, "not_found")
    shown = sandbox.client.instance(running.instance_id)
    assert (shown["state"], shown["reason"]["code"], shown["devices"]) == ("failed", "node_lost", [])
    problem(sandbox.client.get(f"/v1/instances/{deleted.instance_id}"), 404, "not_found")
    problem(sandbox.client.get(f"/v1/gpus/{sandbox.node.gpus[0].uuid}"), 404, "not_found")
    # The credential of the deleted node is rejected.
    problem(sandbox.node.post_sync(), 401, "unauthorized")
    problem(sandbox.client.delete(path), 404, "not_found")
    # The failed instance can be started on another node.
    assert sandbox.client.post(f"/v1/instances/{running.instance_id}/start").json()["state"] == "pending"
    changes = [each for each in _node_events(sandbox) if each["node_id"] == sandbox.node.id]
    assert changes[-1]["state"] == "deleted"


def _node_events(sandbox: Sandbox) -> list[dict[str, object]]:
    """The state changes of all nodes."""
    found, after = [], 0
    while items := sandbox.client.items("/v1/events", after=after, limit=200):
        found += [item["data"] for item in items if item["type"] == "node.state_changed"]
        after = items[-1]["seq"]
    return found


def test_a_node_with_ended_instances_only_can_be_deleted(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    sandbox.sync(observed(assignment, "exited", exit_code=0))
    assert sandbox.client.delete(f"/v1/nodes/{sandbox.node.id}").status_code == 204
    assert sandbox.client.instance(assignment.instance_id)["state"] == "succeeded"
    assert sandbox.client.delete(f"/v1/instances/{assignment.instance_id}").json()["state"] == "deleted"


def test_a_session_newer_than_a_restored_database_is_accepted(sandbox: Sandbox) -> None:
    sandbox.sync()
    with sandbox.service.plane.database.write() as session:
        session.execute(update(Node).where(Node.id == sandbox.node.id).values(session=0, seq=10**6))
    assert sandbox.node.post_sync().status_code == 200
    sandbox.node.session -= 1
    problem(sandbox.node.post_sync(), 409, "stale_session")


def test_a_newer_session_ends_the_older_one_even_while_it_waits(sandbox: Sandbox) -> None:
    sandbox.sync()
    old, answers = sandbox.node.session, []
    waiting = threading.Thread(target=lambda: answers.append(sandbox.node.post_sync(wait_s=60)))
    waiting.start()
    signals, topic = sandbox.service.plane.database.signals, Topic.node(sandbox.node.id)
    wait_until(lambda: waiters(signals, topic))
    other = copy(sandbox.node)
    other.open_session()
    waiting.join(20)
    problem(answers[0], 409, "stale_session")
    assert other.session == old + 1
    problem(sandbox.node.post_sync(), 409, "stale_session")
    other.sync()


def test_a_waiting_sync_is_answered_after_a_change(sandbox: Sandbox) -> None:
    sandbox.sync()
    answers: list[object] = []
    waiting = threading.Thread(target=lambda: answers.append(sandbox.sync(wait_s=60)))
    waiting.start()
    signals, topic = sandbox.service.plane.database.signals, Topic.node(sandbox.node.id)
    wait_until(lambda: waiters(signals, topic))
    made = sandbox.create(gpus={"count": 1})
    waiting.join(20)
    (reply,) = answers
    assert [item.instance_id for item in reply.assignments] == [made["id"]]  # type: ignore[attr-defined]
    # Without a change, a sync is answered at its timeout.
    assert sandbox.node.post_sync(wait_s=0.2).elapsed.total_seconds() >= 0.2


def test_operations_on_an_unknown_node_are_404(shared: Client) -> None:
    for operation in ("cordon", "uncordon", "drain"):
        problem(shared.post(f"/v1/nodes/nod_none/{operation}"), 404, "not_found")
    problem(shared.delete("/v1/nodes/nod_none"), 404, "not_found")
    problem(shared.get("/v1/nodes/nod_none"), 404, "not_found")
    for deadline in (-1, 31 * 86_400, 1.5, "1"):
        answer = shared.post("/v1/nodes/nod_none/drain", json={"deadline_s": deadline})
        problem(answer, 422, "validation_failed")


def test_marking_a_node_unreachable_twice_changes_nothing_more(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    for _ in range(2):
        with sandbox.service.plane.database.write() as session:
            nodes.mark_unreachable(session, sandbox.node.id)
    events = sandbox.client.items(f"/v1/instances/{assignment.instance_id}/events")
    states = [event["data"]["to"] for event in events]
    assert states == ["pending", "scheduled", "running", "unreachable"]
