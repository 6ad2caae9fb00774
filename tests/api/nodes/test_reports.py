"""Reports of nodes, and nodes that stop reporting."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring.agent.sync.identity import StateDirectory
from mooring.control.nodes import nodes
from mooring.schemas.agent import ObservedInstance
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, observed, simulated_node
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

ORPHAN = {"container_id": "beef", "name": "mooring-x-1", "instance_id": "x", "control_plane_id": "cpl_other"}


def _state_and_code(sandbox: Sandbox, instance_id: str) -> tuple[str, str | None]:
    shown = sandbox.client.instance(instance_id)
    return shown["state"], (shown["reason"] or {}).get("code")


def _allocated_gpus(sandbox: Sandbox) -> int:
    gpus = sandbox.client.items("/v1/gpus", node_id=sandbox.node.id)
    return sum(gpu["instance_id"] is not None for gpu in gpus)


@pytest.fixture
def service_with_short_timeout(database_url: str, tmp_path: Path) -> Iterator[RunningService]:
    """A service that marks a node unreachable three seconds after its last report."""
    with running(settings_for(database_url, tmp_path / "data", unreachable_after_s=3)) as made:
        yield made


def test_instances_of_an_unreachable_node_are_unreachable_until_its_next_report(
    service_with_short_timeout: RunningService,
) -> None:
    with service_with_short_timeout.client as client:
        node = WireNode(client, "gpu-1")
        node.sync()
        made = client.create(gpus={"count": 8})
        (assignment,) = wait_until(lambda: node.sync().assignments)  # each report keeps the node reachable
        node.sync(observed(assignment, "running", endpoints=[_endpoint()]))
        before = client.instance(made["id"])
        waiting = client.create(gpus={"count": 1})

        wait_until(lambda: client.get(f"/v1/nodes/{node.id}").json()["state"] == "unreachable")
        wait_until(lambda: client.instance(made["id"])["state"] == "unreachable")
        shown = client.instance(made["id"])
        assert (shown["reason"]["code"], shown["devices"]) == ("node_unreachable", before["devices"])
        assert client.get(f"/v1/nodes/{node.id}").json()["reason"]["code"] == "node_unreachable"
        assert client.instance(waiting["id"])["state"] == "pending"

        node.sync(observed(assignment, "running", endpoints=[_endpoint()]))
        after = client.instance(made["id"])
        ignored = {"version", "queue_position"}
        assert {k: v for k, v in after.items() if k not in ignored} == {
            k: v for k, v in before.items() if k not in ignored
        }
        assert client.get(f"/v1/nodes/{node.id}").json()["state"] == "ready"
        node.close()


def _endpoint() -> dict[str, Any]:
    return {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 32768}


def _mark_unreachable(sandbox: Sandbox) -> None:
    with sandbox.service.plane.database.write() as session:
        nodes.mark_unreachable(session, sandbox.node.id)


def test_an_instance_that_ended_while_its_node_was_unreachable_has_succeeded(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    _mark_unreachable(sandbox)
    sandbox.sync(instances=None)  # the node reconnects, but its Docker does not answer
    assert _state_and_code(sandbox, assignment.instance_id) == ("unreachable", "node_unreachable")
    assert _allocated_gpus(sandbox) == 8
    sandbox.sync(observed(assignment, "exited", exit_code=0))
    assert _state_and_code(sandbox, assignment.instance_id) == ("succeeded", None)
    assert _allocated_gpus(sandbox) == 0


def test_an_instance_without_a_container_after_its_node_reconnects_has_failed(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    _mark_unreachable(sandbox)
    sandbox.sync()
    assert _state_and_code(sandbox, assignment.instance_id) == ("failed", "container_lost")
    assert _allocated_gpus(sandbox) == 0


def test_an_unstarted_instance_is_started_after_its_node_reconnects(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(gpus={"count": 1})
    _mark_unreachable(sandbox)
    assert _state_and_code(sandbox, assignment.instance_id) == ("unreachable", "node_unreachable")
    (again,) = sandbox.sync().assignments
    assert (again.attempt, again.may_start, again.want) == (1, True, "running")
    assert _state_and_code(sandbox, assignment.instance_id) == ("starting", None)
    sandbox.sync(observed(again, "running"))
    assert _state_and_code(sandbox, assignment.instance_id) == ("running", None)


def test_a_stop_of_an_unreachable_instance_is_carried_out_after_its_node_reconnects(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    _mark_unreachable(sandbox)
    stopped = sandbox.client.post(f"/v1/instances/{assignment.instance_id}/stop").json()
    assert (stopped["state"], stopped["desired_state"]) == ("unreachable", "stopped")
    (current,) = sandbox.sync(observed(assignment, "running")).assignments
    assert current.want == "stopped"
    assert _state_and_code(sandbox, assignment.instance_id) == ("stopping", "stopped_by_user")
    sandbox.sync(observed(assignment, "exited", exit_code=143))
    assert _state_and_code(sandbox, assignment.instance_id) == ("stopped", "stopped_by_user")


def test_an_instance_whose_container_disappears_has_failed(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 1})
    sandbox.sync()
    assert _state_and_code(sandbox, assignment.instance_id) == ("failed", "container_lost")


def test_an_instance_that_its_node_has_not_created_yet_stays_scheduled(sandbox: Sandbox) -> None:
    assignment = sandbox.placed()
    for _ in range(2):
        sandbox.sync()
    assert _state_and_code(sandbox, assignment.instance_id) == ("scheduled", None)


def test_a_report_older_than_an_attempt_does_not_change_it(sandbox: Sandbox) -> None:
    first = sandbox.running()
    generation = sandbox.node.generation
    sandbox.client.post(f"/v1/instances/{first.instance_id}/restart")
    sandbox.node.generation = generation  # as if the report had been sent before the restart
    sandbox.node.post_sync()
    assert _state_and_code(sandbox, first.instance_id) == ("scheduled", "restarting")
    second = sandbox.running()
    sandbox.node.generation = generation
    answer = sandbox.node.post_sync()
    assert answer.status_code == 200
    assert _state_and_code(sandbox, second.instance_id) == ("running", None)


@pytest.mark.parametrize("operation", ["stop", "delete"])
def test_gpus_stay_allocated_while_an_earlier_attempt_runs(sandbox: Sandbox, operation: str) -> None:
    """The node has not heard of the restart when the user stops the instance."""
    first = sandbox.running(gpus={"count": 8})
    path = f"/v1/instances/{first.instance_id}"
    assert sandbox.client.post(f"{path}/restart").status_code == 202
    ended = sandbox.client.post(f"{path}/stop") if operation == "stop" else sandbox.client.delete(path)
    assert ended.status_code == 202
    sandbox.sync(instances=None)  # Docker does not answer, but the node now has the current generation
    for phase in ("running", "exited"):
        answer = sandbox.sync(observed(first, phase))
        assert [each.attempt for each in answer.removals] == [1]
        assert _state_and_code(sandbox, first.instance_id)[0] == "stopping"
        assert _allocated_gpus(sandbox) == 8
    sandbox.sync()
    assert _allocated_gpus(sandbox) == 0


def test_a_late_report_is_answered_but_not_applied(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    sandbox.node.seq -= 2
    answer = sandbox.node.post_sync(gpus=[], specs=None, problem={"code": "old", "message": "old"})
    assert answer.status_code == 200
    assert [item["instance_id"] for item in answer.json()["assignments"]] == [assignment.instance_id]
    assert _state_and_code(sandbox, assignment.instance_id) == ("running", None)
    node = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert (node["state"], {gpu["health"] for gpu in node["gpus"]}) == ("ready", {"healthy"})


def test_a_container_of_a_later_attempt_is_an_orphan_and_never_removed(
    sandbox: Sandbox,
) -> None:
    # The database is older than the node, since it was restored from a backup.
    assignment = sandbox.running()
    newer = observed(assignment, "running").model_copy(update={"attempt": 7})
    reply = sandbox.sync(newer, observed(assignment, "running"))
    assert reply.removals == []
    (orphan,) = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()["orphans"]
    assert orphan["name"] == f"mooring-{assignment.instance_id}-7"
    sandbox.client.delete(f"/v1/instances/{assignment.instance_id}")
    assert [gone.attempt for gone in sandbox.sync(newer, observed(assignment, "running")).removals] == [1]


def test_unknown_containers_are_listed_and_not_removed(sandbox: Sandbox) -> None:
    unknown = ObservedInstance.model_validate(
        {"instance_id": "ins_unknown", "attempt": 1, "phase": "running", "container_id": "c0ffee"}
    )
    reply = sandbox.sync(unknown, orphans=[ORPHAN])
    assert (reply.assignments, reply.removals) == ([], [])
    orphans = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()["orphans"]
    assert [orphan["container_id"] for orphan in orphans] == ["beef", "c0ffee"]
    sandbox.sync()
    assert sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()["orphans"] == []


def test_a_container_is_listed_as_an_orphan_once(sandbox: Sandbox) -> None:
    """The agent lists containers that no answer names, and reports their state as well."""
    unknown = ObservedInstance.model_validate(
        {"instance_id": "ins_unknown", "attempt": 1, "phase": "running", "container_id": "c0ffee"}
    )
    listed = {**ORPHAN, "container_id": "c0ffee", "instance_id": "ins_unknown"}
    sandbox.sync(unknown, orphans=[listed])
    (orphan,) = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()["orphans"]
    assert orphan == {**listed, "gpu_uuids": []}


def test_the_first_answer_has_a_generation(shared: Client) -> None:
    """An agent takes generation 0 for "no answer yet", and lists no orphans before the first answer."""
    node = WireNode(shared, "new-node")
    node.facts = node.facts.model_copy(update={"labels": {}})
    try:
        assert node.sync().generation > 0
    finally:
        shared.delete(f"/v1/nodes/{node.id}")
        node.close()


def test_nothing_is_placed_on_gpus_that_orphans_use(sandbox: Sandbox) -> None:
    uuids = [gpu["uuid"] for gpu in sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()["gpus"]]
    sandbox.sync(orphans=[{**ORPHAN, "gpu_uuids": uuids[:7]}])
    assignment = sandbox.placed(gpus={"count": 1})
    assert [grant.gpu_uuid for grant in assignment.grants] == uuids[7:]
    waiting = sandbox.create(gpus={"count": 7})["id"]
    wait_until(lambda: sandbox.client.instance(waiting)["reason"]["code"] == "waiting_for_capacity")
    sandbox.sync(observed(assignment, "running"))
    sandbox.client.wait(waiting, "scheduled")


def test_a_node_cannot_report_instances_of_another_node(sandbox: Sandbox, shared: Client) -> None:
    assignment = sandbox.running(gpus={"count": 1})
    thief = WireNode(shared, f"thief-{sandbox.node.name}")
    thief.facts = thief.facts.model_copy(update={"labels": {}})
    reply = thief.sync(observed(assignment, "exited", exit_code=0))
    assert reply.assignments == []
    # The node removes its container of an instance that is on another node.
    assert [gone.instance_id for gone in reply.removals] == [assignment.instance_id]
    assert _state_and_code(sandbox, assignment.instance_id) == ("running", None)
    incident = {"id": "i", "uuid": sandbox.node.gpus[0].uuid, "code": "xid_79", "message": "no"}
    thief.sync(incidents=[incident])
    assert sandbox.client.get(f"/v1/gpus/{sandbox.node.gpus[0].uuid}").json()["health"] == "healthy"
    shared.delete(f"/v1/nodes/{thief.id}")
    thief.close()


@pytest.mark.parametrize(
    "started_at",
    [
        "2001-01-01T00:00:00Z",
        "2999-01-01T00:00:00Z",
        "nonsense",
        "2026-01-01T00:00:00",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "",
    ],
)
def test_implausible_times_of_a_node_are_not_used(sandbox: Sandbox, started_at: str) -> None:
    assignment = sandbox.placed()
    sandbox.sync(observed(assignment, "running", started_at=started_at))
    shown = sandbox.client.instance(assignment.instance_id)
    assert shown["scheduled_at"] <= shown["started_at"]
    sandbox.sync(observed(assignment, "exited", exit_code=0, finished_at=started_at))
    ended = sandbox.client.instance(assignment.instance_id)
    assert ended["started_at"] <= ended["stopped_at"]


def test_endpoints_are_shown_only_while_the_instance_runs(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(ports=[{"container": 80}])
    sandbox.sync(observed(assignment, "running", endpoints=[_endpoint()], image_digest="sha256:" + "a" * 64))
    shown = sandbox.client.instance(assignment.instance_id)
    (endpoint,) = shown["endpoints"]
    assert endpoint.pop("url").endswith(f"/p/{assignment.instance_id}/80/")
    assert endpoint == _endpoint()
    assert shown["image_digest"] == "sha256:" + "a" * 64
    assert shown["container_id"] == f"{assignment.instance_id}-1"
    sandbox.sync(observed(assignment, "exited", exit_code=0))
    ended = sandbox.client.instance(assignment.instance_id)
    assert (ended["endpoints"], ended["container_id"]) == ([], f"{assignment.instance_id}-1")


def test_a_restarting_container_makes_its_instance_starting(sandbox: Sandbox) -> None:
    assignment = sandbox.running(restart="on_failure")
    backing_off = {"code": "restarting", "message": "exit 1, again in 2 s"}
    sandbox.sync(observed(assignment, "starting", reason=backing_off))
    assert _state_and_code(sandbox, assignment.instance_id) == ("starting", "restarting")
    sandbox.sync(observed(assignment, "running"))
    assert _state_and_code(sandbox, assignment.instance_id) == ("running", None)


def test_an_unchanged_report_changes_nothing(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    version = sandbox.client.instance(assignment.instance_id)["version"]
    events = _node_events(sandbox)
    for _ in range(3):
        sandbox.sync(observed(assignment, "running"))
    assert sandbox.client.instance(assignment.instance_id)["version"] == version
    assert _node_events(sandbox) == events


def _node_events(sandbox: Sandbox) -> list[dict[str, Any]]:
    """The events about the sandbox's node and its instances."""
    found, after = [], 0
    while items := sandbox.client.items("/v1/events", after=after, limit=200):
        found += [item for item in items if item["data"].get("node_id") == sandbox.node.id]
        after = items[-1]["seq"]
    return found


def test_what_is_deleted_while_the_engine_does_not_answer_is_removed_when_it_does(
    client: Client, tmp_path: Path
) -> None:
    """Removals are listed for reported containers, and without an engine none are reported."""
    with simulated_node(client, tmp_path / "node", "gpu-2") as simulated:
        made = client.create(gpus={"count": 1})
        client.wait(made["id"], "running")
        simulated.runtime.unavailable = True
        path = f"/v1/nodes/{simulated.id}"
        wait_until(lambda: client.get(path).json()["state"] == "not_ready", 20)
        state = StateDirectory(tmp_path / "node")
        before = state.generation()
        client.delete(f"/v1/instances/{made['id']}")
        wait_until(lambda: state.generation() > before, 20)  # it has got the answer without the removal
        simulated.runtime.unavailable = False
        wait_until(lambda: client.get(f"/v1/instances/{made['id']}").status_code == 404, 30)
