"""Waits are answered when the state is reached or can no longer be reached, or at the timeout."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic_core import from_json

from mooring.db.signals import Topic
from tests.api.conftest import Sandbox
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.waiters import waiters


class Waiting:
    """A `/wait` in a thread of its own."""

    def __init__(self, client: Client, instance_id: str, state: str, timeout_s: float = 60) -> None:
        self._answer: Any = None

        def get() -> None:
            with Client(str(client.base_url)) as own:
                self._answer = own.get(
                    f"/v1/instances/{instance_id}/wait", params={"state": state, "timeout_s": timeout_s}
                )

        self._thread = threading.Thread(target=get)
        self._thread.start()

    def answer(self) -> dict[str, Any]:
        self._thread.join(20)
        assert not self._thread.is_alive(), "still waiting"
        assert self._answer.status_code == 200, self._answer.text
        return dict(self._answer.json())


@pytest.fixture
def waiting(sandbox: Sandbox) -> Callable[..., Waiting]:
    def begin(instance_id: str, state: str, timeout_s: float = 60) -> Waiting:
        made = Waiting(sandbox.client, instance_id, state, timeout_s)
        signals, topic = sandbox.service.plane.database.signals, Topic.instance(instance_id)
        wait_until(lambda: waiters(signals, topic))
        return made

    return begin


def test_a_wait_is_answered_when_the_state_is_reached(
    sandbox: Sandbox, waiting: Callable[..., Waiting]
) -> None:
    assignment = sandbox.placed()
    request = waiting(assignment.instance_id, "running")
    sandbox.sync(observed(assignment, "running"))
    outcome = request.answer()
    assert (outcome["reached"], outcome["instance"]["state"]) == (True, "running")


def test_a_wait_for_a_current_or_passed_state_is_answered_immediately(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    for state in ("running", "starting", "scheduled"):
        outcome = sandbox.client.get(
            f"/v1/instances/{assignment.instance_id}/wait", params={"state": state, "timeout_s": 60}
        ).json()
        assert outcome["reached"] is True


def test_a_wait_is_answered_when_the_state_can_no_longer_be_reached(
    sandbox: Sandbox, waiting: Callable[..., Waiting]
) -> None:
    assignment = sandbox.placed()
    request = waiting(assignment.instance_id, "running")
    sandbox.sync(observed(assignment, "refused", reason={"code": "image_not_found", "message": "no"}))
    outcome = request.answer()
    assert (outcome["reached"], outcome["instance"]["state"]) == (False, "failed")
    assert outcome["instance"]["reason"]["code"] == "image_not_found"


@pytest.mark.parametrize(
    ("operation", "target"),
    [("stop", "running"), ("stop", "pending"), ("delete", "stopped"), ("delete", "running")],
)
def test_a_wait_is_answered_when_an_operation_prevents_the_state(
    sandbox: Sandbox, waiting: Callable[..., Waiting], operation: str, target: str
) -> None:
    assignment = sandbox.placed()
    # Before the stop, a wait for `pending` would be answered at once: the instance has passed this state.
    request = waiting(assignment.instance_id, target) if target != "pending" else None
    path = f"/v1/instances/{assignment.instance_id}"
    answer = (
        sandbox.client.delete(path) if operation == "delete" else sandbox.client.post(f"{path}/{operation}")
    )
    assert answer.status_code == 202
    request = request or Waiting(sandbox.client, assignment.instance_id, target)
    outcome = request.answer()
    assert (outcome["reached"], outcome["instance"]["state"]) == (False, "stopping")


@pytest.mark.parametrize(("target", "reached"), [("deleted", True), ("running", False), ("failed", False)])
def test_a_wait_for_a_deleted_instance_is_answered_without_404(
    sandbox: Sandbox, waiting: Callable[..., Waiting], target: str, reached: bool
) -> None:
    made = sandbox.create(gpus={"count": 60})
    request = waiting(made["id"], target)
    sandbox.client.delete(f"/v1/instances/{made['id']}")
    outcome = request.answer()
    assert (outcome["reached"], outcome["instance"]["state"]) == (reached, "deleted")
    problem(sandbox.client.get(f"/v1/instances/{made['id']}/wait"), 404, "not_found")


def test_a_wait_ends_at_its_timeout(sandbox: Sandbox) -> None:
    made = sandbox.create(gpus={"count": 60})
    answer = sandbox.client.get(f"/v1/instances/{made['id']}/wait?state=running&timeout_s=1")
    assert answer.json()["reached"] is False
    assert 0.9 < answer.elapsed.total_seconds() < 5


@pytest.mark.parametrize(
    "query",
    [
        "timeout_s=0.5",
        "timeout_s=61",
        "timeout_s=NaN",
        "timeout_s=1e999",
        "timeout_s=-1",
        "state=unreachable",
        "state=nonsense",
        "timeout_s=",
    ],
)
def test_an_invalid_wait_is_rejected(shared: Client, query: str) -> None:
    problem(shared.get(f"/v1/instances/{shared.create()['id']}/wait?{query}"), 422, "validation_failed")


# --- creates with `wait=running`


class Creating:
    """A create that waits, in a thread of its own, on the sandbox's node.

    Attributes:
        id: the instance's.
    """

    def __init__(self, sandbox: Sandbox, name: str, *, gpus: int = 1, **params: Any) -> None:
        self._answer: httpx.Response | None = None
        body = {
            "image": "mooring-test/busybox:1",
            "name": name,
            "node_selector": {"sandbox": sandbox.node.name},
            "gpus": {"count": gpus},
        }
        headers = {"Idempotency-Key": name}

        def post() -> None:
            with Client(str(sandbox.client.base_url)) as own:
                query = {"wait": "running", **params}
                self._answer = own.post("/v1/instances", json=body, params=query, headers=headers)

        self._thread = threading.Thread(target=post)
        self._thread.start()
        (found,) = wait_until(lambda: sandbox.client.items("/v1/instances", name=name))
        self.id: str = found["id"]
        sandbox.created_ids.append(self.id)

    def answer(self) -> httpx.Response:
        self._thread.join(20)
        assert self._answer is not None, "still waiting"
        return self._answer


def test_a_create_that_waits_is_answered_when_the_instance_runs(sandbox: Sandbox) -> None:
    request = Creating(sandbox, "waits-1")
    sandbox.client.wait(request.id, "scheduled")
    assignment = sandbox.assignment(request.id)
    sandbox.sync(observed(assignment, "running"))
    answer = request.answer()
    found = answer.json()
    assert (answer.status_code, found["id"], found["state"]) == (201, request.id, "running")
    assert answer.headers["location"] == f"/v1/instances/{request.id}"
    assert answer.headers["etag"] == f'"{found["version"]}"'
    again = Creating(sandbox, "waits-1").answer()
    assert (again.status_code, again.json()["id"]) == (201, request.id)
    assert again.headers["idempotency-replayed"] == "true"


def test_a_create_that_waits_is_answered_when_the_instance_cannot_run(sandbox: Sandbox) -> None:
    request = Creating(sandbox, "waits-2")
    sandbox.client.wait(request.id, "scheduled")
    reason = {"code": "image_not_found", "message": "no"}
    sandbox.sync(observed(sandbox.assignment(request.id), "refused", reason=reason))
    answer = request.answer()
    found = answer.json()
    assert (answer.status_code, found["state"], found["reason"]["code"]) == (201, "failed", "image_not_found")


def test_a_create_that_waits_is_answered_at_its_timeout(sandbox: Sandbox) -> None:
    answer = Creating(sandbox, "waits-3", timeout_s=1).answer()
    assert (answer.status_code, answer.json()["state"]) == (201, "scheduled")


def test_a_repeated_create_that_waits_for_a_deleted_instance_is_answered_as_the_first(
    sandbox: Sandbox,
) -> None:
    request = Creating(sandbox, "waits-4", gpus=60, timeout_s=1)
    first = request.answer()
    assert sandbox.client.delete(f"/v1/instances/{request.id}").is_success
    body, headers = from_json(first.request.content), {"Idempotency-Key": "waits-4"}
    again = sandbox.client.post("/v1/instances?wait=running&timeout_s=1", json=body, headers=headers)
    assert (again.status_code, again.json()["id"]) == (201, request.id)
