"""Every verb in every state: what is allowed, what is refused, and where it leads."""

from collections.abc import Callable
from typing import Any

import pytest

from mooring.control.nodes import nodes
from tests.api.conftest import Corner
from tests.nodes import seen
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until


def _pending(corner: Corner) -> str:
    made: str = corner.create(gpus={"count": 60})["id"]
    wait_until(lambda: corner.client.instance(made)["reason"]["code"] == "never_placeable")
    return made


def _scheduled(corner: Corner) -> str:
    return corner.placed(gpus={"count": 2}).instance_id


def _starting(corner: Corner) -> str:
    assignment = corner.placed(gpus={"count": 2})
    corner.sync(seen(assignment, "starting"))
    return assignment.instance_id


def _running(corner: Corner) -> str:
    return corner.running(gpus={"count": 2}).instance_id


def _stopping(corner: Corner) -> str:
    instance_id = _running(corner)
    corner.client.post(f"/v1/instances/{instance_id}/stop")
    return instance_id


def _unreachable(corner: Corner) -> str:
    instance_id = _running(corner)
    with corner.service.plane.database.write() as session:
        nodes.mark_unreachable(session, corner.node.id)
    return instance_id


def _ended(exit_code: int) -> Callable[[Corner], str]:
    def end(corner: Corner) -> str:
        assignment = corner.running(gpus={"count": 2})
        corner.sync(seen(assignment, "exited", exit_code=exit_code))
        return assignment.instance_id

    return end


def _stopped(corner: Corner) -> str:
    assignment = corner.running(gpus={"count": 2})
    corner.client.post(f"/v1/instances/{assignment.instance_id}/stop")
    corner.sync(seen(assignment, "exited", exit_code=143))
    return assignment.instance_id


INTO: dict[str, Callable[[Corner], str]] = {
    "pending": _pending,
    "scheduled": _scheduled,
    "starting": _starting,
    "running": _running,
    "stopping": _stopping,
    "unreachable": _unreachable,
    "stopped": _stopped,
    "succeeded": _ended(0),
    "failed": _ended(3),
}

# The state that the verb's 202 shows; None: 409 invalid_transition.
TABLE: dict[str, dict[str, str | None]] = {
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


@pytest.mark.parametrize("verb", ["stop", "start", "restart", "delete"])
@pytest.mark.parametrize("state", list(TABLE))
def test_each_operation_in_each_state(corner: Corner, state: str, verb: str) -> None:
    instance_id = INTO[state](corner)
    before = corner.client.instance(instance_id)
    assert before["state"] == state
    offered = [verb for verb, leads_to in TABLE[state].items() if leads_to]
    assert sorted(before["actions"]) == sorted(offered)

    answer = _ask(corner.client, instance_id, verb)

    leads_to = TABLE[state][verb]
    if leads_to is None:
        assert problem(answer, 409, "invalid_transition")["state"] == state
        assert corner.client.instance(instance_id) == before
        return
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == leads_to
    assert answer.headers["etag"] == f'"{answer.json()["version"]}"'
    if verb != "start":  # what is started is soon placed again
        _leaves_no_gpu_behind(corner, answer.json())


def _ask(client: Client, instance_id: str, verb: str) -> Any:
    if verb == "delete":
        return client.delete(f"/v1/instances/{instance_id}")
    return client.post(f"/v1/instances/{instance_id}/{verb}")


def _leaves_no_gpu_behind(corner: Corner, shown: dict[str, Any]) -> None:
    held = [gpu["instance_id"] for gpu in corner.client.items("/v1/gpus", node_id=corner.node.id)]
    holds = shown["state"] in {"scheduled", "starting", "running", "stopping", "unreachable"}
    assert held.count(shown["id"]) == (2 if holds else 0)


def test_repeating_a_stop_is_an_error_only_once_the_instance_has_stopped(corner: Corner) -> None:
    assignment = corner.running()
    stop = f"/v1/instances/{assignment.instance_id}/stop"
    first = corner.client.post(stop, json={"timeout_s": 3})
    second = corner.client.post(stop, json={"timeout_s": 99})
    assert (first.status_code, second.status_code) == (202, 202)
    assert corner.assignment(assignment.instance_id).stop_timeout_s == 3
    corner.sync(seen(assignment, "exited", exit_code=143))
    problem(corner.client.post(stop), 409, "invalid_transition")


def test_a_stop_reaches_the_node_with_its_timeout_and_a_reason(corner: Corner) -> None:
    assignment = corner.running()
    stopped = corner.client.post(f"/v1/instances/{assignment.instance_id}/stop", json={"timeout_s": 0})
    assert stopped.json()["reason"]["code"] == "stopped_by_user"
    told = corner.assignment(assignment.instance_id)
    assert (told.want, told.stop_timeout_s) == ("stopped", 0)
    corner.sync(seen(assignment, "exited", exit_code=137))
    shown = corner.client.instance(assignment.instance_id)
    assert (shown["state"], shown["exit_code"]) == ("stopped", 137)
    assert shown["reason"]["code"] == "stopped_by_user"
    assert shown["endpoints"] == []


def test_a_restart_is_a_new_attempt_on_the_same_gpus_and_the_old_container_goes_first(corner: Corner) -> None:
    old = corner.running(gpus={"count": 3})
    before = corner.client.instance(old.instance_id)
    restarted = corner.client.post(f"/v1/instances/{old.instance_id}/restart").json()
    assert (restarted["state"], restarted["attempt"]) == ("scheduled", 2)
    assert restarted["devices"] == before["devices"]
    assert restarted["reason"]["code"] == "restarting"
    assert (restarted["container_id"], restarted["started_at"], restarted["exit_code"]) == (None, None, None)

    heard = corner.sync(seen(old, "running"))
    (new,) = heard.assignments
    assert (new.attempt, new.gpu_uuids, new.may_start, new.want) == (2, old.gpu_uuids, True, "running")
    assert [(gone.instance_id, gone.attempt) for gone in heard.removals] == [(old.instance_id, 1)]
    # What the node still says of the first attempt is not taken for the second.
    assert corner.client.instance(old.instance_id)["state"] == "scheduled"
    corner.sync(seen(old, "exited", exit_code=0))
    assert corner.client.instance(old.instance_id)["state"] == "scheduled"

    corner.sync(seen(new, "running"))
    assert corner.client.instance(old.instance_id)["state"] == "running"


def test_a_started_instance_is_placed_again_and_its_old_container_removed(corner: Corner) -> None:
    old = corner.running(gpus={"count": 8})
    ended = seen(old, "exited", exit_code=1, reason={"code": "exited_nonzero", "message": "exit 1"})
    corner.sync(ended)
    other = corner.placed(gpus={"count": 8})  # takes what the first one let go
    started = corner.client.post(f"/v1/instances/{old.instance_id}/start").json()
    assert (started["state"], started["node_id"], started["devices"]) == ("pending", None, [])
    assert (started["exit_code"], started["reason"]["code"]) == (None, "queued")

    heard = corner.sync(ended, seen(other, "running"))
    assert [(gone.instance_id, gone.attempt) for gone in heard.removals] == [(old.instance_id, 1)]
    assert [item.instance_id for item in heard.assignments] == [other.instance_id]

    corner.sync(seen(other, "exited", exit_code=0))
    corner.client.wait(old.instance_id, "scheduled")
    again = corner.assignment(old.instance_id)
    assert (again.attempt, again.may_start) == (2, True)


def test_deleting_twice_while_it_stops_and_after_it_has_gone(corner: Corner) -> None:
    assignment = corner.running()
    path = f"/v1/instances/{assignment.instance_id}"
    assert [corner.client.delete(path).status_code for _ in range(2)] == [202, 202]
    corner.sync(seen(assignment, "exited", exit_code=143))  # a container is left: not yet gone
    assert corner.client.instance(assignment.instance_id)["state"] == "stopping"
    corner.sync()
    problem(corner.client.delete(path), 404, "not_found")
    problem(corner.client.get(path), 404, "not_found")


def test_a_deleted_unreachable_instance_is_gone_once_its_node_confirms_it(corner: Corner) -> None:
    assignment = corner.running(gpus={"count": 8})
    with corner.service.plane.database.write() as session:
        nodes.mark_unreachable(session, corner.node.id)
    path = f"/v1/instances/{assignment.instance_id}"
    deleted = corner.client.delete(path)
    assert (deleted.status_code, deleted.json()["state"]) == (202, "unreachable")
    assert len(deleted.json()["devices"]) == 8

    heard = corner.sync(seen(assignment, "running"))
    assert [gone.instance_id for gone in heard.removals] == [assignment.instance_id]
    assert corner.client.instance(assignment.instance_id)["state"] == "stopping"
    corner.sync()
    problem(corner.client.get(path), 404, "not_found")


def test_a_stop_before_the_node_knows_the_instance_does_not_hang(corner: Corner) -> None:
    made = corner.create(gpus={"count": 1})
    corner.client.wait(made["id"], "scheduled")
    corner.client.post(f"/v1/instances/{made['id']}/stop")
    corner.sync()  # made before it heard of anything: says nothing
    assert corner.client.instance(made["id"])["state"] == "stopping"
    corner.sync()
    assert corner.client.instance(made["id"])["state"] == "stopped"


def test_deleting_an_ended_instance_removes_its_container(corner: Corner) -> None:
    assignment = corner.running()
    ended = seen(assignment, "exited", exit_code=0)
    corner.sync(ended)
    assert corner.client.delete(f"/v1/instances/{assignment.instance_id}").json()["state"] == "deleted"
    assert [gone.instance_id for gone in corner.sync(ended).removals] == [assignment.instance_id]


@pytest.mark.parametrize("verb", ["stop", "start", "restart"])
def test_operations_on_a_missing_instance(shared: Client, verb: str) -> None:
    for name in ("ins_01hzzzzzzzzzzzzzzzzzzzzzzz", "nonsense", "%F0%9F%98%80"):
        problem(shared.post(f"/v1/instances/{name}/{verb}"), 404, "not_found")
        problem(shared.delete(f"/v1/instances/{name}"), 404, "not_found")


@pytest.mark.parametrize("body", [{"timeout_s": -1}, {"timeout_s": 3601}, {"timeout_s": "1"}, {"x": 1}])
def test_a_stop_with_an_invalid_timeout_is_rejected(shared: Client, body: dict[str, Any]) -> None:
    problem(shared.post("/v1/instances/whatever/stop", json=body), 422, "validation_failed")
