"""Requests with the same idempotency key get the same answer."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet
from sqlalchemy import select, update

from mooring.control import idempotency
from mooring.control.tenants.encryption import Encryptor
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import IdempotencyKey, IdempotencyUsage
from mooring.db.types import now
from mooring_client.errors import IdempotencyInProgress, ReplayTooLarge
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import output, status
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

IMAGE = "mooring-test/busybox:1"
ENCRYPTOR = Encryptor([Fernet.generate_key().decode()])


def _post(client: Client, path: str, key: str, body: Any = None) -> httpx.Response:
    return client.post(path, json=body, headers={"Idempotency-Key": key})


def test_a_repeat_gets_the_first_answer_byte_for_byte(sandbox: Sandbox) -> None:
    body = {
        "image": IMAGE,
        "name": f"idem-{sandbox.node.name}",
        "node_selector": {"sandbox": sandbox.node.name},
    }
    first = _post(sandbox.client, "/v1/instances", sandbox.node.name, body)
    assert first.status_code == 201
    assert "idempotency-replayed" not in first.headers
    # The instance changes, the stored answer does not.
    sandbox.client.wait(first.json()["id"], "scheduled")
    again = _post(sandbox.client, "/v1/instances", sandbox.node.name, body)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    for name in ("location", "etag", "content-type"):
        assert again.headers[name] == first.headers[name]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]


@pytest.mark.parametrize("change", ["body", "bytes", "path", "query"])
def test_a_key_with_another_request_is_rejected(sandbox: Sandbox, change: str) -> None:
    key, body = f"one-{sandbox.node.name}", {"image": IMAGE, "labels": {"a": "1"}}
    assert _post(sandbox.client, "/v1/instances", key, body).status_code == 201
    if change == "body":
        other = _post(sandbox.client, "/v1/instances", key, {**body, "labels": {"a": "2"}})
    elif change == "bytes":
        raw = b'{"image": "mooring-test/busybox:1",  "labels": {"a": "1"}}'
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        other = sandbox.client.post("/v1/instances", content=raw, headers=headers)
    elif change == "query":
        other = _post(sandbox.client, "/v1/instances?x=1", key, body)
    else:
        other = _post(sandbox.client, "/v1/join-tokens", key, {})
    problem(other, 422, "idempotency_key_reused")


def test_a_hundred_concurrent_requests_with_one_key_act_once(shared: Client) -> None:
    body = {"image": IMAGE, "labels": {"hundred": "yes"}, "gpus": {"count": 64}}
    answers = run_concurrently(100, lambda _number: _post(shared, "/v1/instances", "hundred", body))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len(shared.items("/v1/instances", label="hundred:yes")) == 1


def test_a_rejected_request_does_not_use_up_its_key(sandbox: Sandbox) -> None:
    key = f"refused-{sandbox.node.name}"
    body = {
        "image": IMAGE,
        "on_capacity": "fail",
        "gpus": {"count": 8},
        "node_selector": {"sandbox": sandbox.node.name},
    }
    holder = sandbox.running(gpus={"count": 1})
    problem(_post(sandbox.client, "/v1/instances", key, body), 409, "insufficient_capacity")
    sandbox.client.delete(f"/v1/instances/{holder.instance_id}")
    sandbox.sync()
    made = _post(sandbox.client, "/v1/instances", key, body)
    assert made.status_code == 201, made.text
    assert "idempotency-replayed" not in made.headers
    # A rejected body does not use up the key either.
    problem(_post(sandbox.client, "/v1/instances", f"{key}-2", {"image": 1}), 422)
    assert _post(sandbox.client, "/v1/instances", f"{key}-2", {"image": IMAGE}).status_code == 201


@pytest.mark.parametrize("operation", ["stop", "restart"])
def test_operations_act_once_per_key(sandbox: Sandbox, operation: str) -> None:
    assignment = sandbox.running()
    path, key = f"/v1/instances/{assignment.instance_id}/{operation}", f"{operation}-{sandbox.node.name}"
    first, second = _post(sandbox.client, path, key), _post(sandbox.client, path, key)
    assert first.status_code == second.status_code == 202
    assert second.content == first.content
    assert sandbox.client.instance(assignment.instance_id)["generation"] == 2


def test_a_command_runs_once_per_key_unless_its_node_rejected_it(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path, key = f"/v1/instances/{assignment.instance_id}/exec", f"exec-{sandbox.node.name}"
    answers: list[httpx.Response] = []

    def exec_with(*messages: bytes, while_it_runs: Callable[[], None] = lambda: None) -> httpx.Response:
        thread = threading.Thread(
            target=lambda: answers.append(_post(sandbox.client, path, key, {"command": ["id"]}))
        )
        thread.start()
        (stream,) = wait_until(sandbox.node.stream_requests)
        while_it_runs()
        sandbox.node.bring(stream.id, *messages)
        thread.join(20)
        return answers[-1]

    def same_key_meanwhile() -> None:
        problem(_post(sandbox.client, path, key, {"command": ["id"]}), 409, "idempotency_in_progress")
        problem(_post(sandbox.client, path, key, {"command": ["other"]}), 422, "idempotency_key_reused")

    refused = exec_with(status(code="not_running"), while_it_runs=same_key_meanwhile)
    problem(refused, 409, "not_running")
    done = exec_with(output("root"), status(7))
    assert done.json() == {"exit_code": 7, "stdout": "root", "stderr": "", "truncated": False}
    again = _post(sandbox.client, path, key, {"command": ["id"]})  # does not reach the node
    assert (again.content, again.headers["idempotency-replayed"]) == (done.content, "true")
    assert sandbox.node.stream_requests() == []
    with sandbox.service.plane.database.read() as session:  # the output may contain a secret
        stored = session.scalars(select(IdempotencyKey).where(IdempotencyKey.key == key)).one()
        assert b"root" not in (stored.body or b"")


def test_a_command_that_may_have_run_is_not_run_again(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path, key = f"/v1/instances/{assignment.instance_id}/exec", f"lost-{sandbox.node.name}"
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(_post(sandbox.client, path, key, {"command": ["id"]}))
    )
    thread.start()
    (stream,) = wait_until(sandbox.node.stream_requests)
    sandbox.node.bring(stream.id, output("half"), status(code="docker_unavailable"))
    thread.join(20)
    problem(answers[0], 503, "docker_unavailable")
    problem(_post(sandbox.client, path, key, {"command": ["id"]}), 409, "idempotency_in_progress")


def test_a_join_token_is_created_once_per_key(shared: Client) -> None:
    first, second = (_post(shared, "/v1/join-tokens", "token", {"ttl_s": 60}) for _ in range(2))
    assert first.status_code == second.status_code == 201
    assert first.content == second.content


@pytest.mark.parametrize("key", ["", "a" * 256, "with space", "tab\there", "é"])
def test_a_malformed_key_is_rejected(shared: Client, key: str) -> None:
    headers = {"Idempotency-Key": key.encode("latin-1")}
    problem(shared.post("/v1/instances", json={"image": IMAGE}, headers=headers), 422, "validation_failed")  # type: ignore[arg-type]


def test_a_key_expires_after_a_day(sandbox: Sandbox) -> None:
    key, body = f"old-{sandbox.node.name}", {"image": IMAGE}
    first = _post(sandbox.client, "/v1/instances", key, body)
    _age(sandbox.service, key, timedelta(hours=23, minutes=59))
    assert _post(sandbox.client, "/v1/instances", key, body).content == first.content
    _age(sandbox.service, key, timedelta(hours=24, seconds=1))
    assert _post(sandbox.client, "/v1/instances", key, body).json()["id"] != first.json()["id"]


def _age(service: RunningService, key: str, by: timedelta) -> None:
    with service.plane.database.write() as session:
        session.execute(update(IdempotencyKey).where(IdempotencyKey.key == key).values(created_at=now() - by))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(database_url, Signals())
    yield made
    made.dispose()


def test_a_claimed_key_stays_in_progress_until_stored_abandoned_or_expired(
    database: Database,
) -> None:
    def claim() -> idempotency.StoredAnswer | None:
        with database.write() as session:
            return idempotency.claim(session, ENCRYPTOR, "me", "key", "fingerprint")

    assert claim() is None
    with pytest.raises(IdempotencyInProgress):
        claim()
    # A command may run for an hour: without an answer after 70 minutes, the replica that ran it has died.
    with database.write() as session:
        session.execute(update(IdempotencyKey).values(created_at=now() - timedelta(minutes=61)))
    with pytest.raises(IdempotencyInProgress):
        claim()
    with database.write() as session:
        session.execute(update(IdempotencyKey).values(created_at=now() - timedelta(hours=2)))
    assert claim() is None
    with database.write() as session:
        idempotency.abandon(session, "me", "key")
    assert claim() is None
    with database.write() as session:
        idempotency.store(session, ENCRYPTOR, "me", "key", idempotency.StoredAnswer(200, b"{}", {"A": "b"}))
    assert claim() == idempotency.StoredAnswer(200, b"{}", {"A": "b"})
    with database.write() as session:
        session.execute(update(IdempotencyKey).values(created_at=now() - timedelta(hours=25)))
        keys = idempotency.expired(session, idempotency.KEPT, 10)
        assert idempotency.forget(session, keys, idempotency.KEPT) == len(keys) == 1
    assert claim() is None


def test_stored_answers_are_limited_per_caller_and_per_project(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_CALLER_BYTES", 1000)
    monkeypatch.setattr(idempotency, "MAX_PROJECT_BYTES", 1500)

    def replayed_body(caller: str, key: str) -> bytes | None:
        """Store an answer of 600 bytes; return the body that a repeat gets, or None if it was not stored."""
        with database.write() as session:
            assert idempotency.claim(session, ENCRYPTOR, caller, key, "fingerprint") is None
            answer = idempotency.StoredAnswer(201, b"x" * 600, {"Location": "/v1/x"})
            idempotency.store(session, ENCRYPTOR, caller, key, answer, "prj_1")
        try:
            with database.write() as session:
                replayed = idempotency.claim(session, ENCRYPTOR, caller, key, "fingerprint")
        except ReplayTooLarge as refused:
            assert refused.fields == {"first_status": 201, "location": "/v1/x"}
            return None
        return replayed.body if replayed else None

    assert replayed_body("me", "1")
    assert replayed_body("me", "2") is None  # the caller has 600 bytes of 1000
    assert replayed_body("you", "1")
    assert replayed_body("they", "1") is None  # the project has 1200 of 1500
    with database.write() as session:
        keys = idempotency.expired(session, timedelta(0), 1)
        assert keys == [("me", "1")]
        assert idempotency.forget(session, keys, timedelta(0)) == 1
    assert replayed_body("they", "2")
    assert replayed_body("me", "3") is None  # the project has 1200 of 1500 again
    with database.write() as session:
        keys = idempotency.expired(session, timedelta(0), 10)
        idempotency.forget(session, keys, timedelta(0))
        assert session.scalars(select(IdempotencyUsage)).all() == []


def test_keys_of_different_callers_are_independent(database: Database) -> None:
    with database.write() as session:
        assert idempotency.claim(session, ENCRYPTOR, "me", "key", "fingerprint") is None
        idempotency.store(session, ENCRYPTOR, "me", "key", idempotency.StoredAnswer(200, b"{}", {}))
    with database.write() as session:
        assert idempotency.claim(session, ENCRYPTOR, "you", "key", "other fingerprint") is None
