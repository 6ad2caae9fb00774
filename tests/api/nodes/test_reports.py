"""What a node's report says, and what its silence says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring.control.nodes import nodes
from mooring.schemas.agent import ObservedInstance
from tests.api.conftest import Corner
from tests.nodes import WireNode, seen
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until


def _shown(corner: Corner, instance_id: str) -> tuple[str, str | None]:
    shown = corner.client.instance(instance_id)
    return shown["state"], (shown["reason"] or {}).get("code")


def _held(corner: Corner) -> int:
    gpus = corner.client.items("/v1/gpus", node_id=corner.node.id)
    return sum(gpu["instance_id"] is not None for gpu in gpus)


@pytest.fixture
def quick(database_url: str, tmp_path: Path) -> Iterator[RunningService]:
    """A service that takes half a second of silence for an absence."""
    with running(settings_for(database_url, tmp_path / "data", unreachable_after_s=0.5)) as made:
        yield made


def test_instances_of_a_silent_node_are_unreachable_until_it_reports_again(quick: RunningService) -> None:
    with quick.client as client:
        node = WireNode(client, "gpu-1")
        node.sync()
        made = client.create(gpus={"count": 8})
        client.wait(made["id"], "scheduled")
        (assignment,) = node.sync().assignments
        node.sync(seen(assignment, "running", endpoints=[_endpoint()]))
        before = client.instance(made["id"])
        waiting = client.create(gpus={"count": 1})

        wait_until(lambda: client.get(f"/v1/nodes/{node.id}").json()["state"] == "unreachable")
        wait_until(lambda: client.instance(made["id"])["state"] == "unreachable")
        shown = client.instance(made["id"])
        assert (shown["reason"]["code"], shown["devices"]) == ("node_unreachable", before["devices"])
        assert client.get(f"/v1/nodes/{node.id}").json()["reason"]["code"] == "node_unreachable"
        assert client.instance(waiting["id"])["state"] == "pending"

        node.sync(seen(assignment, "running", endpoints=[_endpoint()]))
        back = client.instance(made["id"])
        ignored = {"version", "queue_position"}
        assert {k: v for k, v in back.items() if k not in ignored} == {
            k: v for k, v in before.items() if k not in ignored
        }
        assert client.get(f"/v1/nodes/{node.id}").json()["state"] == "ready"
        node.close()


def _endpoint() -> dict[str, Any]:
    return {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 32768}


def _fall_silent(corner: Corner) -> None:
    with corner.service.plane.database.write() as session:
        nodes.mark_unreachable(session, corner.node.id)


def test_an_instance_that_ended_while_its_node_was_silent(corner: Corner) -> None:
    assignment = corner.running(gpus={"count": 8})
    _fall_silent(corner)
    corner.sync(instances=None)  # the node is back, and Docker on it does not answer
    assert _shown(corner, assignment.instance_id) == ("unreachable", "node_unreachable")
    assert _held(corner) == 8
    corner.sync(seen(assignment, "exited", exit_code=0))
    assert _shown(corner, assignment.instance_id) == ("succeeded", None)
    assert _held(corner) == 0


def test_an_instance_whose_container_is_gone_when_its_node_is_back_is_lost(corner: Corner) -> None:
    assignment = corner.running(gpus={"count": 8})
    _fall_silent(corner)
    corner.sync()
    assert _shown(corner, assignment.instance_id) == ("failed", "container_lost")
    assert _held(corner) == 0


def test_an_instance_that_never_started_is_started_when_its_node_is_back(corner: Corner) -> None:
    assignment = corner.placed(gpus={"count": 1})
    _fall_silent(corner)
    assert _shown(corner, assignment.instance_id) == ("unreachable", "node_unreachable")
    (again,) = corner.sync().assignments
    assert (again.attempt, again.may_start, again.want) == (1, True, "running")
    assert _shown(corner, assignment.instance_id) == ("starting", None)
    corner.sync(seen(again, "running"))
    assert _shown(corner, assignment.instance_id) == ("running", None)


def test_a_stop_asked_for_while_its_node_is_silent_is_carried_out_when_it_is_back(corner: Corner) -> None:
    assignment = corner.running()
    _fall_silent(corner)
    stopped = corner.client.post(f"/v1/instances/{assignment.instance_id}/stop").json()
    assert (stopped["state"], stopped["desired_state"]) == ("unreachable", "stopped")
    (told,) = corner.sync(seen(assignment, "running")).assignments
    assert told.want == "stopped"
    assert _shown(corner, assignment.instance_id) == ("stopping", "stopped_by_user")
    corner.sync(seen(assignment, "exited", exit_code=143))
    assert _shown(corner, assignment.instance_id) == ("stopped", "stopped_by_user")


def test_a_container_that_vanishes_has_failed(corner: Corner) -> None:
    assignment = corner.running(gpus={"count": 1})
    corner.sync()
    assert _shown(corner, assignment.instance_id) == ("failed", "container_lost")


def test_an_instance_that_the_node_has_not_created_yet_is_not_lost(corner: Corner) -> None:
    assignment = corner.placed()
    corner.sync()
    corner.sync()
    assert _shown(corner, assignment.instance_id) == ("scheduled", None)


def test_a_report_older_than_an_attempt_does_not_change_it(corner: Corner) -> None:
    first = corner.running()
    heard = corner.node.generation
    corner.client.post(f"/v1/instances/{first.instance_id}/restart")
    corner.node.generation = heard  # made before the restart was heard of
    corner.node.post_sync()
    assert _shown(corner, first.instance_id) == ("scheduled", "restarting")
    second = corner.running()
    corner.node.generation = heard
    answer = corner.node.post_sync()
    assert answer.status_code == 200
    assert _shown(corner, second.instance_id) == ("running", None)


def test_a_late_report_is_answered_but_not_applied(corner: Corner) -> None:
    assignment = corner.running()
    corner.node.seq -= 2
    answer = corner.node.post_sync(gpus=[], specs=None, problem={"code": "old", "message": "news"})
    assert answer.status_code == 200
    assert [item["instance_id"] for item in answer.json()["assignments"]] == [assignment.instance_id]
    assert _shown(corner, assignment.instance_id) == ("running", None)
    node = corner.client.get(f"/v1/nodes/{corner.node.id}").json()
    assert (node["state"], {gpu["health"] for gpu in node["gpus"]}) == ("ready", {"healthy"})


def test_a_report_of_an_attempt_above_the_one_on_record_is_an_orphan_and_never_removed(
    corner: Corner,
) -> None:
    # This database is older than the node: it was restored from a backup.
    assignment = corner.running()
    newer = seen(assignment, "running").model_copy(update={"attempt": 7})
    heard = corner.sync(newer, seen(assignment, "running"))
    assert heard.removals == []
    (orphan,) = corner.client.get(f"/v1/nodes/{corner.node.id}").json()["orphans"]
    assert orphan["name"] == f"mooring-{assignment.instance_id}-7"
    corner.client.delete(f"/v1/instances/{assignment.instance_id}")
    assert [gone.attempt for gone in corner.sync(newer, seen(assignment, "running")).removals] == [1]


def test_unknown_containers_are_listed_and_not_removed(corner: Corner) -> None:
    stranger = ObservedInstance.model_validate(
        {"instance_id": "ins_unknown", "attempt": 1, "phase": "running", "container_id": "c0ffee"}
    )
    foreign = {
        "container_id": "beef",
        "name": "mooring-x-1",
        "instance_id": "x",
        "control_plane_id": "cpl_other",
    }
    heard = corner.sync(stranger, orphans=[foreign])
    assert (heard.assignments, heard.removals) == ([], [])
    orphans = corner.client.get(f"/v1/nodes/{corner.node.id}").json()["orphans"]
    assert [orphan["container_id"] for orphan in orphans] == ["beef", "c0ffee"]
    corner.sync()
    assert corner.client.get(f"/v1/nodes/{corner.node.id}").json()["orphans"] == []


def test_a_node_cannot_report_instances_of_another_node(corner: Corner, shared: Client) -> None:
    assignment = corner.running(gpus={"count": 1})
    thief = WireNode(shared, f"thief-{corner.node.name}")
    thief.facts = thief.facts.model_copy(update={"labels": {}})
    heard = thief.sync(seen(assignment, "exited", exit_code=0))
    assert heard.assignments == []
    # It holds a container of an instance that lives elsewhere: that one goes.
    assert [gone.instance_id for gone in heard.removals] == [assignment.instance_id]
    assert _shown(corner, assignment.instance_id) == ("running", None)
    incident = {"id": "i", "uuid": corner.node.gpus[0].uuid, "code": "xid_79", "message": "no"}
    thief.sync(incidents=[incident])
    assert corner.client.get(f"/v1/gpus/{corner.node.gpus[0].uuid}").json()["health"] == "healthy"
    shared.delete(f"/v1/nodes/{thief.id}")
    thief.close()


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"started_at": "2001-01-01T00:00:00Z"}, False),
        ({"started_at": "2999-01-01T00:00:00Z"}, False),
        ({"started_at": "nonsense"}, False),
        ({"started_at": "2026-01-01T00:00:00"}, False),
        ({"started_at": "0001-01-01T00:00:00+23:59"}, False),
        ({"started_at": "9999-12-31T23:59:59-23:59"}, False),
        ({"started_at": ""}, False),
    ],
)
def test_times_of_a_node_are_used_only_within_plausible_bounds(
    corner: Corner, told: dict[str, str], kept: bool
) -> None:
    assignment = corner.placed()
    corner.sync(seen(assignment, "running", **told))
    shown = corner.client.instance(assignment.instance_id)
    assert shown["scheduled_at"] <= shown["started_at"]
    corner.sync(seen(assignment, "exited", exit_code=0, finished_at=told["started_at"]))
    ended = corner.client.instance(assignment.instance_id)
    assert ended["started_at"] <= ended["stopped_at"]
    assert kept is False


def test_endpoints_and_the_digest_are_shown_while_it_runs(corner: Corner) -> None:
    assignment = corner.placed(ports=[{"container": 80}])
    corner.sync(seen(assignment, "running", endpoints=[_endpoint()], image_digest="sha256:" + "a" * 64))
    shown = corner.client.instance(assignment.instance_id)
    assert shown["endpoints"] == [_endpoint()]
    assert shown["image_digest"] == "sha256:" + "a" * 64
    assert shown["container_id"] == f"{assignment.instance_id}-1"
    corner.sync(seen(assignment, "exited", exit_code=0))
    ended = corner.client.instance(assignment.instance_id)
    assert (ended["endpoints"], ended["container_id"]) == ([], f"{assignment.instance_id}-1")


def test_a_restarting_container_goes_back_to_starting(corner: Corner) -> None:
    assignment = corner.running(restart="on_failure")
    backing_off = {"code": "restarting", "message": "exit 1, again in 2 s"}
    corner.sync(seen(assignment, "starting", reason=backing_off))
    assert _shown(corner, assignment.instance_id) == ("starting", "restarting")
    corner.sync(seen(assignment, "running"))
    assert _shown(corner, assignment.instance_id) == ("running", None)


def test_an_unchanged_report_changes_nothing(corner: Corner) -> None:
    assignment = corner.running()
    version = corner.client.instance(assignment.instance_id)["version"]
    last = corner.client.items("/v1/events", after=0, limit=200)[-1]["seq"]
    for _ in range(3):
        corner.sync(seen(assignment, "running"))
    assert corner.client.instance(assignment.instance_id)["version"] == version
    assert [
        e for e in corner.client.items("/v1/events", after=last) if e["data"].get("node_id") == corner.node.id
    ] == []
