"""The same key gets the same answer, whatever happens in between."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet
from sqlalchemy import select, update

from mooring.control import idempotency
from mooring.control.tenants.encryption import Encryptor
from mooring.core.errors import IdempotencyInProgress, ReplayTooLarge
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import IdempotencyKey, IdempotencyUsage
from mooring.db.types import now
from tests.api.conftest import Corner
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until
from tests.together import together

IMAGE = "mooring-test/busybox:1"


SEALER = Encryptor([Fernet.generate_key().decode()])


def _post(client: Client, path: str, key: str, body: Any = None) -> httpx.Response:
    return client.post(path, json=body, headers={"Idempotency-Key": key})


def test_a_repeat_gets_the_first_answer_byte_for_byte(corner: Corner) -> None:
    body = {"image": IMAGE, "name": f"idem-{corner.node.name}", "node_selector": {"corner": corner.node.name}}
    first = _post(corner.client, "/v1/instances", corner.node.name, body)
    assert first.status_code == 201
    assert "idempotency-replayed" not in first.headers
    corner.client.wait(first.json()["id"], "scheduled")  # it has changed since, and the answer has not
    again = _post(corner.client, "/v1/instances", corner.node.name, body)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    for name in ("location", "etag", "content-type"):
        assert again.headers[name] == first.headers[name]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]


@pytest.mark.parametrize(
    "change",
    ["body", "bytes", "path", "query"],
)
def test_a_key_is_for_one_request(corner: Corner, change: str) -> None:
    key, body = f"one-{corner.node.name}", {"image": IMAGE, "labels": {"a": "1"}}
    assert _post(corner.client, "/v1/instances", key, body).status_code == 201
    if change == "body":
        other = _post(corner.client, "/v1/instances", key, {**body, "labels": {"a": "2"}})
    elif change == "bytes":
        raw = b'{"image": "mooring-test/busybox:1",  "labels": {"a": "1"}}'
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        other = corner.client.post("/v1/instances", content=raw, headers=headers)
    elif change == "query":
        other = _post(corner.client, "/v1/instances?x=1", key, body)
    else:
        other = _post(corner.client, "/v1/join-tokens", key, {})
    problem(other, 422, "idempotency_key_reused")


def test_of_a_hundred_with_one_key_one_acts_and_all_hear_the_same(shared: Client) -> None:
    body = {"image": IMAGE, "labels": {"hundred": "yes"}, "gpus": {"count": 64}}
    answers = together(100, lambda _number: _post(shared, "/v1/instances", "hundred", body))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len(shared.items("/v1/instances", label="hundred:yes")) == 1


def test_a_refusal_is_not_kept(corner: Corner) -> None:
    key = f"refused-{corner.node.name}"
    body = {
        "image": IMAGE,
        "on_capacity": "fail",
        "gpus": {"count": 8},
        "node_selector": {"corner": corner.node.name},
    }
    holder = corner.running(gpus={"count": 1})
    problem(_post(corner.client, "/v1/instances", key, body), 409, "insufficient_capacity")
    corner.client.delete(f"/v1/instances/{holder.instance_id}")
    corner.sync()
    made = _post(corner.client, "/v1/instances", key, body)
    assert made.status_code == 201, made.text
    assert "idempotency-replayed" not in made.headers
    # And a body that was refused does not take the key from a good one.
    problem(_post(corner.client, "/v1/instances", f"{key}-2", {"image": 1}), 422)
    assert _post(corner.client, "/v1/instances", f"{key}-2", {"image": IMAGE}).status_code == 201


@pytest.mark.parametrize("verb", ["stop", "restart"])
def test_verbs_act_once_per_key(corner: Corner, verb: str) -> None:
    assignment = corner.running()
    path, key = f"/v1/instances/{assignment.instance_id}/{verb}", f"{verb}-{corner.node.name}"
    first, second = _post(corner.client, path, key), _post(corner.client, path, key)
    assert first.status_code == second.status_code == 202
    assert second.content == first.content
    assert corner.client.instance(assignment.instance_id)["generation"] == 2


def test_a_command_runs_once_per_key_and_again_if_its_node_refused_it(corner: Corner) -> None:
    assignment = corner.running()
    path, key = f"/v1/instances/{assignment.instance_id}/exec", f"exec-{corner.node.name}"
    answers: list[httpx.Response] = []

    def ask_and_bring(frames: bytes, while_it_runs: Callable[[], None] = lambda: None) -> httpx.Response:
        asking = threading.Thread(
            target=lambda: answers.append(_post(corner.client, path, key, {"command": ["id"]}))
        )
        asking.start()
        (stream,) = wait_until(corner.node.stream_requests)
        while_it_runs()
        assert corner.node.http.post(f"/agent/v1/streams/{stream.id}", content=frames).status_code == 204
        asking.join(20)
        return answers[-1]

    def same_key_meanwhile() -> None:
        problem(_post(corner.client, path, key, {"command": ["id"]}), 409, "idempotency_in_progress")
        problem(_post(corner.client, path, key, {"command": ["other"]}), 422, "idempotency_key_reused")

    refusal = b'{"error": {"code": "not_running", "message": "no"}}\n'
    problem(ask_and_bring(refusal, same_key_meanwhile), 409, "not_running")
    done = ask_and_bring(b'{"stream": "stdout", "text": "root"}\n{"exit_code": 7}\n')
    assert done.json() == {"exit_code": 7, "stdout": "root", "stderr": "", "truncated": False}
    again = _post(corner.client, path, key, {"command": ["id"]})  # and no node is asked
    assert (again.content, again.headers["idempotency-replayed"]) == (done.content, "true")
    assert corner.node.stream_requests() == []
    with corner.service.plane.database.read() as session:  # what it printed may be a secret
        kept = session.scalars(select(IdempotencyKey).where(IdempotencyKey.key == key)).one()
        assert b"root" not in (kept.body or b"")


def test_a_command_that_may_have_run_is_not_run_again_by_a_repeat(corner: Corner) -> None:
    assignment = corner.running()
    path, key = f"/v1/instances/{assignment.instance_id}/exec", f"lost-{corner.node.name}"
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(_post(corner.client, path, key, {"command": ["id"]}))
    )
    asking.start()
    (stream,) = wait_until(corner.node.stream_requests)
    lost = b'{"stream": "stdout", "text": "half"}\n{"error": {"code": "docker_unavailable", "message": ""}}\n'
    corner.node.http.post(f"/agent/v1/streams/{stream.id}", content=lost)
    asking.join(20)
    problem(answers[0], 503, "docker_unavailable")
    problem(_post(corner.client, path, key, {"command": ["id"]}), 409, "idempotency_in_progress")


def test_a_join_token_is_made_once_per_key(shared: Client) -> None:
    first, second = (_post(shared, "/v1/join-tokens", "token", {"ttl_s": 60}) for _ in range(2))
    assert first.status_code == second.status_code == 201
    assert first.content == second.content


@pytest.mark.parametrize("key", ["", "a" * 256, "with space", "tab\there", "é"])
def test_a_key_that_is_none_is_refused(shared: Client, key: str) -> None:
    headers = {"Idempotency-Key": key.encode("latin-1")}
    problem(shared.post("/v1/instances", json={"image": IMAGE}, headers=headers), 422, "validation_failed")  # type: ignore[arg-type]


def test_a_key_is_forgotten_after_a_day(corner: Corner) -> None:
    key, body = f"old-{corner.node.name}", {"image": IMAGE}
    first = _post(corner.client, "/v1/instances", key, body)
    _age(corner.service, key, timedelta(hours=23, minutes=59))
    assert _post(corner.client, "/v1/instances", key, body).content == first.content
    _age(corner.service, key, timedelta(hours=24, seconds=1))
    assert _post(corner.client, "/v1/instances", key, body).json()["id"] != first.json()["id"]


def _age(service: RunningService, key: str, by: timedelta) -> None:
    with service.plane.database.write() as session:
        session.execute(update(IdempotencyKey).where(IdempotencyKey.key == key).values(created_at=now() - by))


@pytest.fixture
def database(database_url: str) -> Any:
    made = Database(database_url, Signals())
    yield made
    made.dispose()


def test_an_act_outside_of_a_transaction_holds_its_key_until_it_is_answered_or_abandoned(
    database: Database,
) -> None:
    def claim() -> idempotency.StoredAnswer | None:
        with database.write() as session:
            return idempotency.claim(session, SEALER, "me", "key", "print")

    assert claim() is None
    with pytest.raises(IdempotencyInProgress):
        claim()
    # A command may run for an hour; only then has its replica died.
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
        idempotency.store(session, SEALER, "me", "key", idempotency.StoredAnswer(200, b"{}", {"A": "b"}))
    assert claim() == idempotency.StoredAnswer(200, b"{}", {"A": "b"})
    with database.write() as session:
        session.execute(update(IdempotencyKey).values(created_at=now() - timedelta(hours=25)))
        keys = idempotency.expired(session, idempotency.KEPT, 10)
        assert idempotency.forget(session, keys, idempotency.KEPT) == len(keys) == 1
    assert claim() is None


def test_answers_of_a_caller_and_of_a_project_fill_only_so_much(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_CALLER_BYTES", 1000)
    monkeypatch.setattr(idempotency, "MAX_PROJECT_BYTES", 1500)

    def repeat(caller: str, key: str) -> bytes | None:
        """What a repeat gets of an answer of 600 bytes, as JSON; null: that it was not kept."""
        with database.write() as session:
            assert idempotency.claim(session, SEALER, caller, key, "print") is None
            answer = idempotency.StoredAnswer(201, b"x" * 600, {"Location": "/v1/x"})
            idempotency.store(session, SEALER, caller, key, answer, "prj_1")
        try:
            with database.write() as session:
                replayed = idempotency.claim(session, SEALER, caller, key, "print")
        except ReplayTooLarge as refused:
            assert refused.fields == {"first_status": 201, "location": "/v1/x"}
            return None
        return replayed.body if replayed else None

    assert repeat("me", "1")
    assert repeat("me", "2") is None  # the caller has 600 bytes of 1000
    assert repeat("you", "1")
    assert repeat("they", "1") is None  # the project has 1200 of 1500
    with database.write() as session:
        keys = idempotency.expired(session, timedelta(0), 1)
        assert keys == [("me", "1")]
        assert idempotency.forget(session, keys, timedelta(0)) == 1
    assert repeat("they", "2")
    assert repeat("me", "3") is None  # the project again
    with database.write() as session:
        keys = idempotency.expired(session, timedelta(0), 10)
        idempotency.forget(session, keys, timedelta(0))
        assert session.scalars(select(IdempotencyUsage)).all() == []


def test_keys_of_different_callers_do_not_meet(database: Database) -> None:
    with database.write() as session:
        assert idempotency.claim(session, SEALER, "me", "key", "print") is None
        idempotency.store(session, SEALER, "me", "key", idempotency.StoredAnswer(200, b"mine", {}))
    with database.write() as session:
        assert idempotency.claim(session, SEALER, "you", "key", "other print") is None
