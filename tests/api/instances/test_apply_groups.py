"""Applying instance groups by name."""

from typing import Any

import pytest

from mooring.db.tables import InstanceGroup
from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

GROUPS = "/v1/instance-groups"
TEMPLATE: dict[str, Any] = {
    "image": "mooring-test/busybox:1", "node_selector": {"sandbox": "nowhere"}, "env": {"A": "1"},
    "labels": {"of": "members"}, "gpus": {"count": 1},
}  # fmt: skip
FULL: dict[str, Any] = {
    "count": 2, "template": TEMPLATE, "labels": {"a": "b"}, "on_member_failure": "restart_member",
    "network": {"mode": "overlay", "encrypted": True}, "master_port": 1234,
}  # fmt: skip


def _by_name(name: str) -> str:
    return f"{GROUPS}/by-name/{name}"


def test_a_repeated_request_changes_nothing(shared_service: RunningService, shared: Client) -> None:
    created = shared.put(_by_name("gang-a"), json=FULL)
    assert (created.status_code, created.headers["mooring-applied"]) == (201, "created")
    made = created.json()
    assert created.headers["location"] == f"{GROUPS}/{made['id']}"
    assert made["template"]["labels"] == {"of": "members"}
    member = shared.instance(made["members"][0]["instance_id"])
    assert member["labels"] == {"a": "b", "of": "members"}

    def settled() -> bool:
        reasons = [each["reason"] for each in shared.get(f"{GROUPS}/{made['id']}").json()["members"]]
        return all(reason and reason["code"] != "queued" for reason in reasons)

    wait_until(settled)
    before, seq = shared.get(f"{GROUPS}/{made['id']}").json(), shared_service.newest_seq
    again = shared.put(_by_name("gang-a"), json={**FULL, "name": "gang-a"})
    assert (again.status_code, again.headers["mooring-applied"]) == (200, "unchanged")
    assert again.json() == before
    assert shared_service.newest_seq == seq


def test_what_is_read_can_be_written_back(shared: Client) -> None:
    for number, fields in enumerate((FULL, {"count": 1, "template": {"image": "mooring-test/busybox:1"}})):
        made = shared.post(GROUPS, json={**fields, "name": f"back-{number}"}).json()
        body = {field: made[field] for field in (*FULL, "name")}
        body["network"] = {field: made["network"][field] for field in ("mode", "encrypted")}
        answer = shared.put(_by_name(f"back-{number}"), json=body)
        assert (answer.status_code, answer.headers.get("mooring-applied")) == (200, "unchanged"), answer.text
        shared.delete(f"{GROUPS}/{made['id']}")


def test_a_group_of_an_earlier_release_is_compared_without_the_labels_of_its_template(
    shared_service: RunningService, shared: Client
) -> None:
    made = shared.put(_by_name("earlier"), json=FULL).json()
    with shared_service.plane.database.write() as session:
        row = session.get_one(InstanceGroup, made["id"])
        row.template = {name: value for name, value in row.template.items() if name != "labels"}
    other = {**FULL, "template": {**TEMPLATE, "labels": {"x": "y"}}}
    for body in (FULL, other):
        assert shared.put(_by_name("earlier"), json=body).headers["mooring-applied"] == "unchanged"
    assert shared.put(_by_name("earlier"), json={**FULL, "count": 1}).status_code == 409


@pytest.mark.parametrize(
    ("change", "pointers"),
    [
        ({"count": 3}, ["/count"]),
        ({"labels": {}}, ["/labels/a"]),
        ({"master_port": 1}, ["/master_port"]),
        ({"on_member_failure": "fail_group"}, ["/on_member_failure"]),
        ({"network": {}}, ["/network/mode", "/network/encrypted"]),
        ({"template": {**TEMPLATE, "labels": {}}}, ["/template/labels/of"]),
        ({"template": {**TEMPLATE, "priority": 1}}, ["/template/priority"]),
        ({"template": {**TEMPLATE, "env": {"A": "2"}}}, ["/template/env/A"]),
    ],
)
def test_every_difference_requires_a_new_group(
    shared: Client, change: dict[str, Any], pointers: list[str]
) -> None:
    made = shared.put(_by_name("gang-b"), json=FULL).json()
    found = problem(shared.put(_by_name("gang-b"), json={**FULL, **change}), 409, "requires_replacement")
    assert (found["pointers"], found["id"]) == (pointers, made["id"])
    planned = shared.put(_by_name("gang-b"), json={**FULL, **change}, params={"dry_run": True}).json()
    assert (planned["outcome"], planned["id"]) == ("requires_replacement", made["id"])
    assert [(each["pointer"], each["fixed"]) for each in planned["changes"]] == [(p, True) for p in pointers]
    if "env" in pointers[0]:
        assert [(each["before"], each["after"]) for each in planned["changes"]] == [(None, None)]


def test_a_plan_creates_nothing(shared: Client) -> None:
    planned = shared.put(_by_name("planned"), json=FULL, params={"dry_run": True})
    assert planned.json() == {"outcome": "created", "id": None, "changes": []}
    assert shared.items(GROUPS, name="planned") == []


def _state(sandbox: Sandbox, group_id: str) -> str | None:
    """The group's state after a report of the node, which has no containers; None: it is gone."""
    sandbox.sync()
    answer = sandbox.client.get(f"{GROUPS}/{group_id}")
    return answer.json()["state"] if answer.status_code == 200 else None


def test_an_ended_group_is_not_run_again_and_a_deleted_one_is_replaced(sandbox: Sandbox) -> None:
    client = sandbox.client
    template = {**TEMPLATE, "node_selector": {"sandbox": sandbox.node.name}}
    body = {"count": 1, "template": template}
    made = client.put(_by_name("gang-c"), json=body).json()
    member = made["members"][0]["instance_id"]
    client.wait(member, "scheduled")
    sandbox.sync(observed(sandbox.assignment(member), "running"))
    client.wait(member, "running")
    client.delete(f"{GROUPS}/{made['id']}")
    found = problem(client.put(_by_name("gang-c"), json=body), 409, "being_deleted")
    assert found["id"] == made["id"]
    wait_until(lambda: _state(sandbox, made["id"]) is None)
    again = client.put(_by_name("gang-c"), json=body)
    assert again.status_code == 201
    client.post(f"{GROUPS}/{again.json()['id']}/stop")
    wait_until(lambda: _state(sandbox, again.json()["id"]) == "stopped")
    assert client.put(_by_name("gang-c"), json=body).headers["mooring-applied"] == "unchanged"
    client.delete(f"{GROUPS}/{again.json()['id']}")


def test_if_match_names_the_version_of_the_group(shared: Client) -> None:
    stale = {"If-Match": '"99999"'}
    problem(shared.put(_by_name("gang-d"), json=FULL, headers=stale), 412, "precondition_failed")
    shared.put(_by_name("gang-d"), json=FULL)
    problem(shared.put(_by_name("gang-d"), json=FULL, headers=stale), 412, "precondition_failed")


def test_the_name_must_leave_room_for_ranks(shared: Client) -> None:
    assert shared.put(_by_name("a" * 61), json=FULL).status_code == 422
    found = problem(shared.put(_by_name("gang-e"), json={**FULL, "name": "other"}), 422, "validation_failed")
    assert [each["pointer"] for each in found["errors"]] == ["/name"]


def test_the_name_of_a_member_may_be_taken(shared: Client) -> None:
    shared.create(name="gang-f-1", node_selector={"sandbox": "nowhere"})
    problem(shared.put(_by_name("gang-f"), json=FULL), 409, "name_taken")
    assert shared.items(GROUPS, name="gang-f") == []


def test_of_8_requests_exactly_one_creates(shared: Client) -> None:
    answers = run_concurrently(8, lambda _n: shared.put(_by_name("gang-g"), json=FULL))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(shared.items(GROUPS, name="gang-g")) == 1
