"""Every operation in every state: allowed, rejected, and the resulting state."""

from collections.abc import Callable
from typing import Any

import pytest

from mooring.control.nodes import nodes
from tests.api.conftest import Sandbox
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until


def _pending(sandbox: Sandbox) -> str:
    made: str = sandbox.create(gpus={"count": 60})["id"]
    wait_until(lambda: sandbox.client.instance(made)["reason"]["code"] == "never_placeable")
    return made


def _scheduled(sandbox: Sandbox) -> str:
    return sandbox.placed(gpus={"count": 2}).instance_id


def _starting(sandbox: Sandbox) -> str:
    assignment = sandbox.placed(gpus={"count": 2})
    sandbox.sync(observed(assignment, "starting"))
    return assignment.instance_id


def _running(sandbox: Sandbox) -> str:
    return sandbox.running(gpus={"count": 2}).instance_id


def _stopping(sandbox: Sandbox) -> str:
    instance_id = _running(sandbox)
    sandbox.client.post(f"/v1/instances/{instance_id}/stop")
    return instance_id


def _unreachable(sandbox: Sandbox) -> str:
    instance_id = _running(sandbox)
    with sandbox.service.plane.database.write() as session:
        nodes.mark_unreachable(session, sandbox.node.id)
    return instance_id


def _exited_with(exit_code: int) -> Callable[[Sandbox], str]:
    def end(sandbox: Sandbox) -> str:
        assignment = sandbox.running(gpus={"count": 2})
        sandbox.sync(observed(assignment, "exited", exit_code=exit_code))
        return assignment.instance_id

    return end


def _stopped(sandbox: Sandbox) -> str:
    assignment = sandbox.running(gpus={"count": 2})
    sandbox.client.post(f"/v1/instances/{assignment.instance_id}/stop")
    sandbox.sync(observed(assignment, "exited", exit_code=143))
    return assignment.instance_id


# Functions that create an instance in this state and return its id.
ENTER_STATE: dict[str, Callable[[Sandbox], str]] = {
    "pending": _pending,
    "scheduled": _scheduled,
    "starting": _starting,
    "running": _running,
    "stopping": _stopping,
    "unreachable": _unreachable,
    "stopped": _stopped,
    "succeeded": _exited_with(0),
    "failed": _exited_with(3),
}

# The state in the 202 answer; None: 409 invalid_transition.
RESULTING_STATES: dict[str, dict[str, str | None]] = {
    "pending": {"stop": "stopped", "start": None, "restart": None, "delete": "deleted"},
    "scheduled": {"stop": "stopping", "start": None, "restart": "scheduled", "delete": "stopping"},
    "starting": {"stop": "stopping", "start": None, "restart": "scheduled", "delete": "stopping"},
    "running": {"stop": "stopping", "start": None, "restart": "scheduled", "delete": "stopping"},
    "stopping": {"stop": "stopping", "start": None, "restart": None, "delete": "stopping"},
    "unreachable": {"stop": "unreachable", "start": None, "restart": None, "delete": "unreachable"},
    "stopped": {"stop": None, "start": "pending", "restart": None, "delete": "deleted"},
    "succeeded": {"stop": None, "start": "pending", "restart": None, "delete": "deleted"},
    "failed": {"stop": None, "start": "pending", "restart": None, "delete": "deleted"},
}


@pytest.mark.parametrize("operation", ["stop", "start", "restart", "delete"])
@pytest.mark.parametrize("state", list(RESULTING_STATES))
def test_each_operation_in_each_state(sandbox: Sandbox, state: str, operation: str) -> None:
    instance_id = ENTER_STATE[state](sandbox)
    before = sandbox.client.instance(instance_id)
    assert before["state"] == state
    offered = [operation for operation, leads_to in RESULTING_STATES[state].items() if leads_to]
    assert sorted(before["actions"]) == sorted(offered)

    answer = _request(sandbox.client, instance_id, operation)

    leads_to = RESULTING_STATES[state][operation]
    if leads_to is None:
        assert problem(answer, 409, "invalid_transition")["state"] == state
        assert sandbox.client.instance(instance_id) == before
        return
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == leads_to
    assert answer.headers["etag"] == f'"{answer.json()["version"]}"'
    if operation != "start":  # a started instance may be placed again already
        _require_gpus_only_if_active(sandbox, answer.json())


def _request(client: Client, instance_id: str, operation: str) -> Any:
    if operation == "delete":
        return client.delete(f"/v1/instances/{instance_id}")
    return client.post(f"/v1/instances/{instance_id}/{operation}")


def _require_gpus_only_if_active(sandbox: Sandbox, shown: dict[str, Any]) -> None:
    holders = [gpu["instance_id"] for gpu in sandbox.client.items("/v1/gpus", node_id=sandbox.node.id)]
    is_active = shown["state"] in {"scheduled", "starting", "running", "stopping", "unreachable"}
    assert holders.count(shown["id"]) == (2 if is_active else 0)


def test_repeating_a_stop_is_an_error_only_once_the_instance_has_stopped(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    stop = f"/v1/instances/{assignment.instance_id}/stop"
    first = sandbox.client.post(stop, json={"timeout_s": 3})
    second = sandbox.client.post(stop, json={"timeout_s": 99})
    assert (first.status_code, second.status_code) == (202, 202)
    assert sandbox.assignment(assignment.instance_id).stop_timeout_s == 3
    sandbox.sync(observed(assignment, "exited", exit_code=143))
    problem(sandbox.client.post(stop), 409, "invalid_transition")


def test_a_stop_reaches_the_node_with_its_timeout(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    stopped = sandbox.client.post(f"/v1/instances/{assignment.instance_id}/stop", json={"timeout_s": 0})
    assert stopped.json()["reason"]["code"] == "stopped_by_user"
    assignment_after = sandbox.assignment(assignment.instance_id)
    assert (assignment_after.want, assignment_after.stop_timeout_s) == ("stopped", 0)
    sandbox.sync(observed(assignment, "exited", exit_code=137))
    shown = sandbox.client.instance(assignment.instance_id)
    assert (shown["state"], shown["exit_code"]) == ("stopped", 137)
    assert shown["reason"]["code"] == "stopped_by_user"
    assert shown["endpoints"] == []


def test_a_restart_replaces_the_container_on_the_same_gpus(
    sandbox: Sandbox,
) -> None:
    old = sandbox.running(gpus={"count": 3})
    before = sandbox.client.instance(old.instance_id)
    restarted = sandbox.client.post(f"/v1/instances/{old.instance_id}/restart").json()
    assert (restarted["state"], restarted["attempt"]) == ("scheduled", 2)
    assert restarted["devices"] == before["devices"]
    assert restarted["reason"]["code"] == "restarting"
    assert (restarted["container_id"], restarted["started_at"], restarted["exit_code"]) == (None, None, None)

    reply = sandbox.sync(observed(old, "running"))
    (new,) = reply.assignments
    assert (new.attempt, new.gpu_uuids, new.may_start, new.want) == (2, old.gpu_uuids, True, "running")
    assert [(gone.instance_id, gone.attempt) for gone in reply.removals] == [(old.instance_id, 1)]
    # Reports of the first attempt do not change the second.
    assert sandbox.client.instance(old.instance_id)["state"] == "scheduled"
    sandbox.sync(observed(old, "exited", exit_code=0))
    assert sandbox.client.instance(old.instance_id)["state"] == "scheduled"

    sandbox.sync(observed(new, "running"))
    assert sandbox.client.instance(old.instance_id)["state"] == "running"


def test_a_start_places_the_instance_again_and_removes_the_old_container(sandbox: Sandbox) -> None:
    old = sandbox.running(gpus={"count": 8})
    ended = observed(old, "exited", exit_code=1, reason={"code": "exited_nonzero", "message": "exit 1"})
    sandbox.sync(ended)
    other = sandbox.placed(gpus={"count": 8})  # uses the GPUs that the ended instance released
    started = sandbox.client.post(f"/v1/instances/{old.instance_id}/start").json()
    assert (started["state"], started["node_id"], started["devices"]) == ("pending", None, [])
    assert (started["exit_code"], started["reason"]["code"]) == (None, "queued")

    reply = sandbox.sync(ended, observed(other, "running"))
    assert [(gone.instance_id, gone.attempt) for gone in reply.removals] == [(old.instance_id, 1)]
    assert [item.instance_id for item in reply.assignments] == [other.instance_id]

    sandbox.sync(observed(other, "exited", exit_code=0))
    sandbox.client.wait(old.instance_id, "scheduled")
    again = sandbox.assignment(old.instance_id)
    assert (again.attempt, again.may_start) == (2, True)


def test_a_delete_can_be_repeated_until_the_instance_is_gone(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    path = f"/v1/instances/{assignment.instance_id}"
    assert [sandbox.client.delete(path).status_code for _ in range(2)] == [202, 202]
    # The container has exited but still exists, so the instance is not gone.
    sandbox.sync(observed(assignment, "exited", exit_code=143))
    assert sandbox.client.instance(assignment.instance_id)["state"] == "stopping"
    sandbox.sync()
    problem(sandbox.client.delete(path), 404, "not_found")
    problem(sandbox.client.get(path), 404, "not_found")


def test_a_deleted_unreachable_instance_is_gone_once_its_node_confirms_it(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    with sandbox.service.plane.database.write() as session:
        nodes.mark_unreachable(session, sandbox.node.id)
    path = f"/v1/instances/{assignment.instance_id}"
    deleted = sandbox.client.delete(path)
    assert (deleted.status_code, deleted.json()["state"]) == (202, "unreachable")
    assert len(deleted.json()["devices"]) == 8

    reply = sandbox.sync(observed(assignment, "running"))
    assert [gone.instance_id for gone in reply.removals] == [assignment.instance_id]
    assert sandbox.client.instance(assignment.instance_id)["state"] == "stopping"
    sandbox.sync()
    problem(sandbox.client.get(path), 404, "not_found")


def test_a_stop_before_the_node_knows_the_instance_completes(sandbox: Sandbox) -> None:
    made = sandbox.create(gpus={"count": 1})
    sandbox.client.wait(made["id"], "scheduled")
    sandbox.client.post(f"/v1/instances/{made['id']}/stop")
    sandbox.sync()  # sent before the node received the assignment, so it confirms nothing
    assert sandbox.client.instance(made["id"])["state"] == "stopping"
    sandbox.sync()
    assert sandbox.client.instance(made["id"])["state"] == "stopped"


def test_deleting_an_ended_instance_removes_its_container(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    ended = observed(assignment, "exited", exit_code=0)
    sandbox.sync(ended)
    assert sandbox.client.delete(f"/v1/instances/{assignment.instance_id}").json()["state"] == "deleted"
    assert [gone.instance_id for gone in sandbox.sync(ended).removals] == [assignment.instance_id]


@pytest.mark.parametrize("operation", ["stop", "start", "restart"])
def test_operations_on_an_unknown_instance_are_404(shared: Client, operation: str) -> None:
    for name in ("ins_01hzzzzzzzzzzzzzzzzzzzzzzz", "nonsense", "%F0%9F%98%80"):
        problem(shared.post(f"/v1/instances/{name}/{operation}"), 404, "not_found")
        problem(shared.delete(f"/v1/instances/{name}"), 404, "not_found")


@pytest.mark.parametrize("body", [{"timeout_s": -1}, {"timeout_s": 3601}, {"timeout_s": "1"}, {"x": 1}])
def test_a_stop_with_an_invalid_timeout_is_rejected(shared: Client, body: dict[str, Any]) -> None:
    problem(shared.post("/v1/instances/whatever/stop", json=body), 422, "validation_failed")
