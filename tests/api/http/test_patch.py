"""Changing an instance, and ETags."""

from typing import Any

import pytest

from tests.api.conftest import Sandbox
from tests.concurrency import run_concurrently
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until


def _path(instance_id: str) -> str:
    return f"/v1/instances/{instance_id}"


def test_changing_name_and_labels_changes_nothing_else(sandbox: Sandbox) -> None:
    made = sandbox.create(name="before", labels={"team": "a"}, gpus={"count": 60}, command=["sleep", "1"])
    changed = sandbox.client.patch(_path(made["id"]), json={"name": "after", "labels": {"team": "b"}})
    assert changed.status_code == 200
    shown = changed.json()
    assert (shown["name"], shown["labels"]) == ("after", {"team": "b"})
    assert shown["version"] > made["version"]
    # The scheduler may set the reason and the queue position meanwhile.
    ignored = {"name", "labels", "version", "reason", "queue_position"}
    assert {k: v for k, v in shown.items() if k not in ignored} == {
        k: v for k, v in made.items() if k not in ignored
    }
    assert sandbox.create(name="before")["name"] == "before"  # the old name is free again


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
def test_an_invalid_change_is_rejected_and_its_field_named(
    shared: Client, body: Any, code: str, pointer: str
) -> None:
    made = shared.create()
    document = problem(shared.patch(_path(made["id"]), json=body), 422, code)
    assert document["errors"][0]["pointer"].startswith(pointer)
    assert shared.instance(made["id"])["name"] == made["name"]


def test_a_name_in_use_is_rejected_until_its_instance_is_deleted(shared: Client) -> None:
    shared.create(name="taken-1")
    second = shared.create(name="taken-2")
    problem(shared.patch(_path(second["id"]), json={"name": "taken-1"}), 409, "name_taken")
    assert shared.patch(_path(second["id"]), json={"name": "taken-2"}).status_code == 200  # its own name
    shared.delete("/v1/instances/" + shared.items("/v1/instances", name="taken-1")[0]["id"])
    assert shared.patch(_path(second["id"]), json={"name": "taken-1"}).status_code == 200


def test_a_stale_etag_changes_nothing(shared: Client) -> None:
    made = shared.create(gpus={"count": 64})
    # Once the scheduler has set the reason, only the test changes the version.
    wait_until(lambda: shared.instance(made["id"])["reason"]["code"] != "queued")
    answer = shared.patch(_path(made["id"]), json={"labels": {"a": "1"}})
    fresh, stale = answer.headers["etag"], '"1"'
    assert fresh == f'"{answer.json()["version"]}"' == shared.get(_path(made["id"])).headers["etag"]
    for header in (stale, '"nonsense"', "99999999999999999999", '"-1"', 'W/"1"'):
        rejected = shared.patch(_path(made["id"]), json={"labels": {}}, headers={"If-Match": header})
        problem(rejected, 412, "precondition_failed")
        problem(shared.delete(_path(made["id"]), headers={"If-Match": header}), 412, "precondition_failed")
    assert shared.instance(made["id"])["labels"] == {"a": "1"}
    assert shared.patch(_path(made["id"]), json={}, headers={"If-Match": "*"}).status_code == 200
    current = shared.get(_path(made["id"])).headers["etag"]
    assert shared.delete(_path(made["id"]), headers={"If-Match": current}).status_code == 202


def test_one_of_many_concurrent_changes_with_one_etag_succeeds(sandbox: Sandbox) -> None:
    made = sandbox.running()
    etag = sandbox.client.get(_path(made.instance_id)).headers["etag"]
    answers = run_concurrently(
        8,
        lambda number: (
            sandbox.client.patch(
                _path(made.instance_id), json={"labels": {"by": str(number)}}, headers={"If-Match": etag}
            ).status_code
        ),
    )
    assert sorted(answers) == [200] + [412] * 7


def test_a_changed_duration_counts_from_the_start(sandbox: Sandbox) -> None:
    assignment = sandbox.running(max_duration_s=3600)
    before = sandbox.client.instance(assignment.instance_id)
    assert before["expires_at"] is not None
    path = _path(assignment.instance_id)
    unlimited = sandbox.client.patch(path, json={"max_duration_s": None}).json()
    assert (unlimited["max_duration_s"], unlimited["expires_at"]) == (None, None)
    limited = sandbox.client.patch(path, json={"max_duration_s": 3600}).json()
    assert (limited["max_duration_s"], limited["expires_at"]) == (3600, before["expires_at"])


def test_setting_the_duration_of_an_ended_instance_does_not_set_its_expiry(sandbox: Sandbox) -> None:
    assignment = sandbox.running()
    sandbox.sync(observed(assignment, "exited", exit_code=0))
    changed = sandbox.client.patch(_path(assignment.instance_id), json={"max_duration_s": 1}).json()
    assert (changed["state"], changed["expires_at"]) == ("succeeded", None)
