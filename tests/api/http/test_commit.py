"""An answer is sent only after the commit."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy import text

from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases

# Each makes COMMIT fail, after every statement of the transaction has succeeded.
FAILING = {
    "sqlite": [
        "CREATE TABLE IF NOT EXISTS doomed (id TEXT REFERENCES projects (id) DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER doom AFTER INSERT ON events BEGIN INSERT INTO doomed VALUES ('no-project'); END",
    ],
    "postgresql": [
        "CREATE FUNCTION doom() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the disk is full' USING ERRCODE = '53100'; END $$",
        "CREATE CONSTRAINT TRIGGER doom AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION doom()",
    ],
}
REPAIR = {
    "sqlite": ["DROP TRIGGER doom"],
    "postgresql": ["DROP TRIGGER doom ON events", "DROP FUNCTION doom"],
}


def _run(service: RunningService, statements: dict[str, list[str]]) -> None:
    with service.plane.database.engine.begin() as connection:
        for statement in statements[connection.dialect.name]:
            connection.execute(text(statement))


@contextmanager
def failing_commits(service: RunningService) -> Iterator[None]:
    """Within the block, each transaction that writes an event fails in COMMIT."""
    _run(service, FAILING)
    try:
        yield
    finally:
        _run(service, REPAIR)


def _require_failure(answer: httpx.Response) -> None:
    assert answer.status_code in {409, 503}, answer.text
    problem(answer, answer.status_code)


@pytest.mark.parametrize("on_capacity", ["queue", "fail"])
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}], ids=["without key", "with key"])
def test_a_create_whose_commit_fails_is_not_201(
    service: RunningService, client: Client, node: WireNode, on_capacity: str, headers: dict[str, str]
) -> None:
    body = {"image": "a", "name": "doomed", "on_capacity": on_capacity}
    with failing_commits(service):
        for _ in range(3):
            _require_failure(client.post("/v1/instances", json=body, headers=headers))
        assert client.items("/v1/instances") == []
    # Neither the connection pool nor the idempotency key is left in a broken state.
    made = client.post("/v1/instances", json=body, headers=headers)
    assert made.status_code == 201, made.text
    assert "idempotency-replayed" not in made.headers
    assert [item["name"] for item in client.items("/v1/instances")] == ["doomed"]


def test_operations_and_reports_whose_commit_fails_change_nothing(
    service: RunningService, client: Client, node: WireNode
) -> None:
    made = client.create(gpus={"count": 1})
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync().assignments
    node.sync(observed(assignment, "running"))
    instance, gpus = client.instance(made["id"]), client.items("/v1/gpus")
    path = f"/v1/instances/{made['id']}"
    with failing_commits(service):
        for answer in (
            client.post(f"{path}/stop"),
            client.post(f"{path}/restart"),
            client.delete(path),
            client.post(f"/v1/nodes/{node.id}/cordon"),
            client.delete(f"/v1/nodes/{node.id}", params={"force": True}),
            node.post_sync(observed(assignment, "exited", exit_code=0)),
        ):
            _require_failure(answer)
        assert client.instance(made["id"]) == instance
        assert client.items("/v1/gpus") == gpus
    node.sync(observed(assignment, "exited", exit_code=0))
    assert client.instance(made["id"])["state"] == "succeeded"
