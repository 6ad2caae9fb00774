"""What may be changed of an instance, and ETags."""

from typing import Any

import pytest

from tests.api.conftest import Corner
from tests.nodes import seen
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.together import together


def _path(instance_id: str) -> str:
    return f"/v1/instances/{instance_id}"


def test_a_name_and_labels_are_changed_and_nothing_else(corner: Corner) -> None:
    made = corner.create(name="before", labels={"team": "a"}, gpus={"count": 60}, command=["sleep", "1"])
    changed = corner.client.patch(_path(made["id"]), json={"name": "after", "labels": {"team": "b"}})
    assert changed.status_code == 200
    shown = changed.json()
    assert (shown["name"], shown["labels"]) == ("after", {"team": "b"})
    assert shown["version"] > made["version"]
    ignored = {"name", "labels", "version", "reason", "queue_position"}
    assert {k: v for k, v in shown.items() if k not in ignored} == {
        k: v for k, v in made.items() if k not in ignored
    }
    assert corner.create(name="before")["name"] == "before"  # the old name is free again


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"name": None}, "validation_failed", "/name"),
        ({"name": ""}, "validation_failed", "/name"),
        ({"name": "Not_A_Label"}, "validation_failed", "/name"),
        ({"name": "a" * 64}, "validation_failed", "/name"),
        ({"labels": None}, "validation_failed", "/labels"),
        ({"labels": {"mooring.instance": "x"}}, "reserved_label", "/labels"),
        ({"labels": {"-bad": "x"}}, "validation_failed", "/labels/-bad"),
        ({"max_duration_s": 0}, "validation_failed", "/max_duration_s"),
        ({"max_duration_s": "60"}, "validation_failed", "/max_duration_s"),
        ({"max_duration_s": 2**70}, "validation_failed", "/max_duration_s"),
        ({"priority": 101}, "validation_failed", "/priority"),
        ({"priority": None}, "validation_failed", "/priority"),
        ({"image": "another"}, "validation_failed", "/image"),
        ({"state": "running"}, "validation_failed", "/state"),
        ({"project_id": "x"}, "validation_failed", "/project_id"),
        ([], "validation_failed", ""),
        ("name", "validation_failed", ""),
        (None, "validation_failed", ""),
    ],
)
def test_what_cannot_be_changed_is_refused_and_named(
    shared: Client, body: Any, code: str, pointer: str
) -> None:
    made = shared.create()
    document = problem(shared.patch(_path(made["id"]), json=body), 422, code)
    assert document["errors"][0]["pointer"].startswith(pointer)
    assert shared.instance(made["id"])["name"] == made["name"]


def test_a_taken_name_is_refused_until_its_holder_is_deleted(shared: Client) -> None:
    shared.create(name="taken-1")
    second = shared.create(name="taken-2")
    problem(shared.patch(_path(second["id"]), json={"name": "taken-1"}), 409, "name_taken")
    assert shared.patch(_path(second["id"]), json={"name": "taken-2"}).status_code == 200  # its own
    shared.delete("/v1/instances/" + shared.items("/v1/instances", name="taken-1")[0]["id"])
    assert shared.patch(_path(second["id"]), json={"name": "taken-1"}).status_code == 200


def test_a_stale_etag_changes_nothing(shared: Client) -> None:
    made = shared.create(gpus={"count": 64})
    wait_until(lambda: shared.instance(made["id"])["reason"]["code"] != "queued")  # the scheduler is done
    answer = shared.patch(_path(made["id"]), json={"labels": {"a": "1"}})
    fresh, stale = answer.headers["etag"], '"1"'
    assert fresh == f'"{answer.json()["version"]}"' == shared.get(_path(made["id"])).headers["etag"]
    for header in (stale, '"nonsense"', "99999999999999999999", '"-1"', 'W/"1"'):
        refused = shared.patch(_path(made["id"]), json={"labels": {}}, headers={"If-Match": header})
        problem(refused, 412, "precondition_failed")
        problem(shared.delete(_path(made["id"]), headers={"If-Match": header}), 412, "precondition_failed")
    assert shared.instance(made["id"])["labels"] == {"a": "1"}
    assert shared.patch(_path(made["id"]), json={}, headers={"If-Match": "*"}).status_code == 200
    current = shared.get(_path(made["id"])).headers["etag"]
    assert shared.delete(_path(made["id"]), headers={"If-Match": current}).status_code == 202


def test_of_many_changes_under_one_etag_one_is_made(corner: Corner) -> None:
    made = corner.running()
    etag = corner.client.get(_path(made.instance_id)).headers["etag"]
    answers = together(
        8,
        lambda number: (
            corner.client.patch(
                _path(made.instance_id), json={"labels": {"by": str(number)}}, headers={"If-Match": etag}
            ).status_code
        ),
    )
    assert sorted(answers) == [200] + [412] * 7


def test_a_changed_duration_counts_from_the_start(corner: Corner) -> None:
    assignment = corner.running(max_duration_s=3600)
    before = corner.client.instance(assignment.instance_id)
    assert before["expires_at"] is not None
    path = _path(assignment.instance_id)
    none = corner.client.patch(path, json={"max_duration_s": None}).json()
    assert (none["max_duration_s"], none["expires_at"]) == (None, None)
    again = corner.client.patch(path, json={"max_duration_s": 3600}).json()
    assert (again["max_duration_s"], again["expires_at"]) == (3600, before["expires_at"])


def test_an_ended_one_does_not_expire_whatever_its_duration_is_set_to(corner: Corner) -> None:
    assignment = corner.running()
    corner.sync(seen(assignment, "exited", exit_code=0))
    changed = corner.client.patch(_path(assignment.instance_id), json={"max_duration_s": 1}).json()
    assert (changed["state"], changed["expires_at"]) == ("succeeded", None)
