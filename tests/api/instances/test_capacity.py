"""Dry runs, immediate placement and explanations."""

from typing import Any

import httpx
import pytest

from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

IMAGE = "mooring-test/busybox:1"
# Without these fields, three of eight GPUs need three eighths of the node's CPUs and memory too.
SMALL = {"cpus": 1, "memory_mib": 1024}


def _create_or_fail(client: Client, **fields: object) -> httpx.Response:
    return client.post("/v1/instances", json={"image": IMAGE, "on_capacity": "fail", **fields})


def test_a_dry_run_names_the_gpus_it_would_take_and_takes_none(client: Client, node: WireNode) -> None:
    body = {"image": IMAGE, "name": "dry", "gpus": {"count": 3}}
    answer = client.post("/v1/instances?dry_run=true", json=body, headers={"Idempotency-Key": "dry"})
    assert answer.status_code == 200, answer.text
    outcome = answer.json()
    assert (outcome["placeable"], outcome["node_id"], outcome["refusals"]) == (True, node.id, [])
    assert len({device["uuid"] for device in outcome["devices"]}) == 3
    assert client.items("/v1/instances") == []
    assert client.items("/v1/events", limit=200)[-1]["type"] == "node.state_changed"
    # The dry run did not use up the key.
    assert client.post("/v1/instances", json=body, headers={"Idempotency-Key": "dry"}).status_code == 201


def test_a_dry_run_lists_why_each_node_is_unsuitable(client: Client, node: WireNode) -> None:
    other = WireNode(client, "gpu-2", gpus=1)
    other.sync()
    body = {"image": IMAGE, "gpus": {"count": 9}, "node_selector": {"zone": "b"}}
    outcome = client.post("/v1/instances?dry_run=true", json=body).json()
    assert (outcome["placeable"], outcome["node_id"], outcome["devices"]) == (False, None, [])
    by_node_and_code = {(refusal["node_name"], refusal["code"]): refusal for refusal in outcome["refusals"]}
    assert by_node_and_code.keys() == {
        (name, code) for name in ("gpu-1", "gpu-2") for code in ("selector_mismatch", "insufficient_gpus")
    }
    refusal = by_node_and_code["gpu-2", "insufficient_gpus"]
    assert refusal["node_id"] == other.id
    assert "9" in refusal["wanted"]
    assert "1" in refusal["had"]
    other.close()


def test_on_capacity_fail_places_immediately_or_returns_what_would_fit(
    client: Client, node: WireNode
) -> None:
    placed = _create_or_fail(client, gpus={"count": 6}, name="now")
    assert placed.status_code == 201
    shown = placed.json()
    assert (shown["state"], shown["attempt"], len(shown["devices"])) == ("scheduled", 1, 6)
    assert [item.instance_id for item in node.sync().assignments] == [shown["id"]]

    refused = problem(
        _create_or_fail(client, gpus={"count": 3}, name="no", **SMALL), 409, "insufficient_capacity"
    )
    assert refused["retryable"] is True
    assert refused["would_fit"] == {"max_count_now": 2, "models_now": []}
    assert [refusal["code"] for refusal in refused["refusals"]] == ["insufficient_gpus"]
    assert "up to 2" in refused["detail"]
    assert [item["name"] for item in client.items("/v1/instances")] == ["now"]
    # The rejected instance leaves nothing: its name can be used again.
    assert _create_or_fail(client, gpus={"count": 2}, name="no").status_code == 201


def test_on_capacity_fail_without_nodes_is_rejected(client: Client) -> None:
    refused = problem(_create_or_fail(client), 409, "insufficient_capacity")
    assert refused["refusals"] == []
    assert client.items("/v1/instances") == []


def test_explain_follows_changes_of_the_cluster(client: Client, node: WireNode) -> None:
    first = client.create(gpus={"count": 6})
    client.wait(first["id"], "scheduled")
    waiting = client.create(gpus={"count": 4}, **SMALL)
    wait_until(lambda: client.instance(waiting["id"])["reason"]["code"] == "waiting_for_capacity")
    explained = client.get(f"/v1/instances/{waiting['id']}/explain").json()
    assert (explained["state"], explained["queue_position"], explained["node_id"]) == ("pending", 1, None)
    assert explained["would_fit"].items() >= {"max_count_now": 2, "models_now": []}.items()
    assert "best: 2 on gpu-1" in explained["reason"]["message"]

    client.post(f"/v1/nodes/{node.id}/cordon")
    codes = {
        refusal["code"] for refusal in client.get(f"/v1/instances/{waiting['id']}/explain").json()["refusals"]
    }
    assert codes == {"insufficient_gpus", "node_cordoned"}

    placed = client.get(f"/v1/instances/{first['id']}/explain").json()
    assert (placed["state"], placed["refusals"], placed["would_fit"]) == ("scheduled", [], None)
    problem(client.get("/v1/instances/none/explain"), 404, "not_found")


def test_instance_types_count_all_and_available_gpus(client: Client, node: WireNode) -> None:
    types = _types_by_gpu_count(client)
    assert sorted(types) == [1, 2, 4, 8]
    assert types[8] == {
        "name": "h100-80gb-hbm3-x8",
        "gpu_model": "NVIDIA H100 80GB HBM3",
        "gpu_memory_mib": 81559,
        "gpu_count": 8,
        "mig_profile": None,
        "max_share_now": None,
        "total": 1,
        "available": 1,
        "max_gpus_per_node_now": 8,
        "price_micros_per_hour": None,
        "currency": None,
    }
    client.wait(client.create(gpus={"count": 3})["id"], "scheduled")
    types = _types_by_gpu_count(client)
    assert [(types[n]["total"], types[n]["available"]) for n in (1, 2, 4, 8)] == [
        (8, 5),
        (4, 2),
        (2, 1),
        (1, 0),
    ]
    client.post(f"/v1/nodes/{node.id}/cordon")
    assert {each["available"] for each in client.items("/v1/instance-types")} == {0}


def _types_by_gpu_count(client: Client) -> dict[int, dict[str, Any]]:
    return {each["gpu_count"]: each for each in client.items("/v1/instance-types")}


def test_pending_instances_are_placed_oldest_first(client: Client, node: WireNode) -> None:
    holder = client.create(gpus={"count": 8})
    client.wait(holder["id"], "scheduled")
    queue = [client.create(gpus={"count": 8})["id"] for _ in range(3)]
    for expected in queue:
        for assignment in node.sync(instances=None).assignments:
            client.delete(f"/v1/instances/{assignment.instance_id}")
        node.sync(instances=None)
        node.sync()  # the container of the deleted instance is gone
        client.wait(expected, "scheduled")
        assert len(client.items("/v1/instances", state="scheduled")) == 1
