"""The life of an instance over HTTP."""

import pytest

from tests.nodes import WireNode, observed
from tests.service import Client
from tests.testbed.waiting import wait_until


def test_an_instance_goes_from_create_to_running_to_gone(client: Client, node: WireNode) -> None:
    made = client.create(name="train-1", gpus={"count": 2, "model": "h100"})
    assert made["state"] == "pending"

    placed = client.wait(made["id"], "scheduled")
    assert [device["model"] for device in placed["devices"]] == ["NVIDIA H100 80GB HBM3"] * 2
    (assignment,) = node.sync().assignments
    assert sorted(assignment.gpu_uuids) == sorted(device["uuid"] for device in placed["devices"])

    node.sync(observed(assignment, "running"))
    assert client.instance(made["id"])["state"] == "running"

    assert client.delete(f"/v1/instances/{made['id']}").status_code == 202
    (removal,) = node.sync(observed(assignment, "running")).removals
    assert (removal.instance_id, removal.attempt) == (made["id"], 1)
    assert client.instance(made["id"])["state"] == "stopping"

    node.sync()
    assert client.get(f"/v1/instances/{made['id']}").status_code == 404
    assert all(gpu["instance_id"] is None for gpu in client.items("/v1/gpus"))


def test_gpus_stay_allocated_until_the_container_is_confirmed_gone(client: Client, node: WireNode) -> None:
    first = client.create(gpus={"count": 8})
    client.wait(first["id"], "scheduled")
    (assignment,) = node.sync().assignments
    node.sync(observed(assignment, "running"))
    client.post(f"/v1/instances/{first['id']}/stop")
    second = client.create(gpus={"count": 1})

    node.sync(instances=None)  # the state of the containers is unknown, which does not count as gone
    node.sync(observed(assignment, "running"))
    assert client.instance(second["id"])["state"] == "pending"

    node.sync(observed(assignment, "exited", exit_code=143))
    assert client.wait(second["id"], "scheduled")["devices"]
    assert client.instance(first["id"])["state"] == "stopped"


def test_a_pending_instance_has_a_reason(client: Client, node: WireNode) -> None:
    made = client.create(gpus={"count": 9})
    reason = wait_until(lambda: _reason_after_scheduling(client, made["id"]))
    assert reason["code"] == "never_placeable"
    explained = client.get(f"/v1/instances/{made['id']}/explain").json()
    assert explained["queue_position"] == 1
    assert {refusal["code"] for refusal in explained["refusals"]} == {"insufficient_gpus"}
    assert explained["would_fit"]["max_count_now"] == 8


def _reason_after_scheduling(client: Client, instance_id: str) -> dict[str, str] | None:
    reason: dict[str, str] = client.instance(instance_id)["reason"]
    return reason if reason["code"] != "queued" else None


@pytest.mark.parametrize(
    ("phase", "fields", "state", "code"),
    [
        ("exited", {"exit_code": 0}, "succeeded", None),
        (
            "exited",
            {"exit_code": 3, "reason": {"code": "exited_nonzero", "message": "exit 3"}},
            "failed",
            "exited_nonzero",
        ),
        (
            "refused",
            {"reason": {"code": "image_not_found", "message": "no such image"}},
            "failed",
            "image_not_found",
        ),
    ],
)
def test_an_ended_instance_has_a_reason_and_no_gpus(
    client: Client, node: WireNode, phase: str, fields: dict[str, object], state: str, code: str | None
) -> None:
    made = client.create(gpus={"count": 8})
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync().assignments
    node.sync(observed(assignment, phase, **fields))
    shown = client.instance(made["id"])
    assert shown["state"] == state
    assert (shown["reason"] or {}).get("code") == code
    assert shown["devices"] == []
    assert shown["actions"] == ["start", "delete"]
