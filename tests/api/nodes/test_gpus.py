"""GPUs: inventory, health and live figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mooring.control.nodes import nodes
from tests.api.conftest import Corner
from tests.nodes import WireNode, seen
from tests.problems import problem
from tests.service import Client


def _gpu(corner: Corner, index: int) -> dict[str, Any]:
    return dict(corner.client.get(f"/v1/gpus/{corner.node.gpus[index].uuid}").json())


def _health(corner: Corner, index: int) -> tuple[str, str | None]:
    shown = _gpu(corner, index)
    return shown["health"], (shown["reason"] or {}).get("code")


def _incident(corner: Corner, index: int, number: str, code: str = "xid_79") -> dict[str, str]:
    return {"id": number, "uuid": corner.node.gpus[index].uuid, "code": code, "message": "what happened"}


def test_a_gpu_is_shown_with_what_its_node_says_of_it(corner: Corner) -> None:
    peer = {"uuid": corner.node.gpus[1].uuid, "links": 18}
    facts: dict[str, Any] = {
        "pci_bus_id": "00000000:1B:00.0",
        "numa_node": 0,
        "compute_capability": "9.0",
        "mig_mode": "disabled",
        "nvlink_peers": [peer],
    }
    corner.sync(gpus=[{**corner.node.gpus[0].model_dump(), **facts}, *corner.node.gpus[1:]])
    shown = _gpu(corner, 0)
    assert {key: shown[key] for key in facts} == facts
    assert (shown["node_name"], shown["index"], shown["simulated"]) == (corner.node.name, 0, False)
    assert _gpu(corner, 1)["numa_node"] is None  # not told is null, never 0
    problem(corner.client.get("/v1/gpus/GPU-none"), 404, "not_found")
    problem(corner.client.get("/v1/gpus/GPU-none/metrics"), 404, "not_found")
    problem(corner.client.post("/v1/gpus/GPU-none/clear"), 404, "not_found")


def test_a_card_that_is_not_listed_is_lost_and_stays_quarantined_when_it_is_back(corner: Corner) -> None:
    all_of_them = corner.node.gpus
    corner.sync(gpus=all_of_them[1:])
    assert _health(corner, 0) == ("lost", "gpu_missing")
    problem(corner.client.post(f"/v1/gpus/{all_of_them[0].uuid}/clear"), 409, "gpu_lost")
    corner.sync(gpus=None)  # not known is not gone, nor is it back
    assert _health(corner, 0) == ("lost", "gpu_missing")
    for _ in range(2):
        corner.sync(gpus=all_of_them)
        assert _health(corner, 0) == ("quarantined", "gpu_returned")
    assert corner.client.create(on_capacity="queue", gpus={"count": 8})["state"] == "pending"
    cleared = corner.client.post(f"/v1/gpus/{all_of_them[0].uuid}/clear")
    assert (cleared.json()["health"], cleared.json()["reason"]) == ("healthy", None)
    corner.sync(gpus=all_of_them)
    assert _health(corner, 0) == ("healthy", None)


def test_a_lost_card_stays_with_its_holder(corner: Corner) -> None:
    assignment = corner.running(gpus={"count": 8})
    corner.sync(seen(assignment, "running"), gpus=corner.node.gpus[1:])
    assert _health(corner, 0) == ("lost", "gpu_missing")
    assert _gpu(corner, 0)["instance_id"] == assignment.instance_id
    corner.sync(seen(assignment, "exited", exit_code=1), gpus=corner.node.gpus[1:])
    assert _gpu(corner, 0)["instance_id"] is None
    corner.placed(gpus={"count": 7})
    waiting = corner.create(gpus={"count": 1})
    assert corner.client.instance(waiting["id"])["devices"] == []


def test_a_fault_takes_a_card_out_until_it_is_mended(corner: Corner) -> None:
    broken = corner.node.gpus[0].model_copy(update={"fault": "reset_required"})
    corner.sync(gpus=[broken, *corner.node.gpus[1:]])
    assert _health(corner, 0) == ("quarantined", "reset_required")
    corner.client.post(f"/v1/gpus/{broken.uuid}/clear")
    corner.sync(gpus=[broken, *corner.node.gpus[1:]])
    assert _health(corner, 0) == ("quarantined", "reset_required")
    corner.sync()  # mended: an admin still has to say so
    assert _health(corner, 0) == ("quarantined", "reset_required")
    corner.client.post(f"/v1/gpus/{broken.uuid}/clear")
    corner.sync()
    assert _health(corner, 0) == ("healthy", None)


def test_an_incident_counts_once_however_often_it_is_told(corner: Corner) -> None:
    first, second = _incident(corner, 0, "a"), _incident(corner, 0, "b", "xid_48")
    other = _incident(corner, 1, "c")
    corner.sync(incidents=[first, other, second])
    assert _health(corner, 0) == ("quarantined", "xid_48")
    corner.client.post(f"/v1/gpus/{first['uuid']}/clear")
    corner.sync(incidents=[first, other, second])  # its answer was lost, so the node repeats
    assert _health(corner, 0) == ("healthy", None)
    corner.sync(incidents=[first, other, second, _incident(corner, 0, "d")])
    assert _health(corner, 0) == ("quarantined", "xid_79")
    assert _health(corner, 1) == ("quarantined", "xid_79")
    kinds = [
        (event["data"]["from"], event["data"]["to"])
        for event in _events(corner.client)
        if event["data"].get("gpu_uuid") == first["uuid"]
    ]
    assert kinds == [
        ("healthy", "quarantined"),
        ("quarantined", "quarantined"),
        ("quarantined", "healthy"),
        ("healthy", "quarantined"),
    ]


def _events(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while items := client.items("/v1/events", after=found[-1]["seq"] if found else 0, limit=200):
        found += items
    return found


def test_a_quarantined_card_is_not_given_out(corner: Corner) -> None:
    corner.sync(incidents=[_incident(corner, index, f"i-{index}") for index in range(7)])
    first, second = corner.placed(gpus={"count": 1}), corner.create(gpus={"count": 1})
    assert first.gpu_uuids == [corner.node.gpus[7].uuid]
    corner.client.post(f"/v1/gpus/{corner.node.gpus[3].uuid}/clear")
    corner.client.wait(second["id"], "scheduled")
    assert corner.assignment(second["id"]).gpu_uuids == [corner.node.gpus[3].uuid]


def test_a_gpu_that_two_nodes_list_stays_where_it_is_approved(corner: Corner, shared: Client) -> None:
    twin = WireNode(shared, f"twin-{corner.node.name}", gpus=1)
    both = [corner.node.gpus[0], twin.gpus[0]]
    for _ in range(3):
        twin.sync(gpus=both)
    shown = shared.get(f"/v1/nodes/{twin.id}").json()
    assert (shown["state"], shown["reason"]) == ("ready", None)
    assert [gpu["uuid"] for gpu in shown["gpus"]] == [twin.gpus[0].uuid]
    (change,) = shown["facts_changed"]["changes"]
    assert (change["fact"], change["gpu_uuid"], change["node_id"]) == ("gpu", both[0].uuid, corner.node.id)
    assert _gpu(corner, 0)["node_id"] == corner.node.id
    claims = [event["data"] for event in _events(shared) if event["type"] == "gpu.claimed"]
    assert [claim for claim in claims if claim["claimed_by"] == twin.id] == [
        {"gpu_uuid": both[0].uuid, "node_id": corner.node.id, "claimed_by": twin.id}
    ]
    # A GPU that was put into another machine: an admin says so.
    corner.sync(gpus=corner.node.gpus[1:])
    twin.sync(gpus=both)
    assert _gpu(corner, 0)["node_id"] == corner.node.id
    approved = shared.post(f"/v1/nodes/{twin.id}/approve")
    assert (approved.status_code, approved.json()["facts_changed"]) == (200, None)
    twin.sync(gpus=both)
    moved = _gpu(corner, 0)
    assert (moved["node_id"], moved["health"]) == (twin.id, "quarantined")
    corner.sync()
    assert shared.get(f"/v1/nodes/{corner.node.id}").json()["state"] == "ready"
    assert _gpu(corner, 0)["node_id"] == twin.id
    shared.delete(f"/v1/nodes/{twin.id}")
    corner.sync()
    assert shared.get(f"/v1/nodes/{corner.node.id}").json()["reason"]["code"] == "facts_changed"
    shared.post(f"/v1/nodes/{corner.node.id}/approve")
    corner.sync()
    assert _gpu(corner, 0)["node_id"] == corner.node.id
    twin.close()


def test_a_card_that_is_held_does_not_move(corner: Corner, shared: Client) -> None:
    assignment = corner.running(gpus={"count": 8})
    corner.sync(seen(assignment, "running"), gpus=[])
    twin = WireNode(shared, f"held-{corner.node.name}", gpus=0)
    twin.sync(gpus=[corner.node.gpus[0]])
    problem(shared.post(f"/v1/nodes/{twin.id}/approve"), 409, "gpu_in_use")
    assert _gpu(corner, 0)["node_id"] == corner.node.id
    shared.delete(f"/v1/nodes/{twin.id}")
    twin.close()


def test_a_card_listed_twice_is_one(corner: Corner) -> None:
    corner.sync(gpus=[*corner.node.gpus, corner.node.gpus[0]])
    new = corner.node.gpus[0].model_copy(update={"uuid": f"{corner.node.gpus[0].uuid}-new"})
    for _ in range(2):
        corner.sync(gpus=[*corner.node.gpus, new, new])
        corner.client.post(f"/v1/nodes/{corner.node.id}/approve")
    assert len(corner.client.items("/v1/gpus", node_id=corner.node.id)) == 9


def test_samples_are_shown_while_the_node_is_heard(corner: Corner) -> None:
    sample = {
        "uuid": corner.node.gpus[0].uuid,
        "index": 0,
        "sampled_at": "2026-11-21T08:00:00Z",
        "power_w": 71.5,
    }
    path = f"/v1/gpus/{sample['uuid']}/metrics"
    assert problem(corner.client.get(path), 503, "no_sample")["retryable"] is True
    assignment = corner.running(gpus={"count": 8})
    corner.sync(seen(assignment, "running"), samples=[sample])
    shown = corner.client.get(path).json()
    assert (shown["power_w"], shown["temperature_c"], shown["processes"]) == (71.5, None, None)
    of_instance = corner.client.items(f"/v1/instances/{assignment.instance_id}/metrics")
    assert [item["uuid"] for item in of_instance] == [sample["uuid"]]
    with corner.service.plane.database.write() as session:
        nodes.mark_unreachable(session, corner.node.id)
    problem(corner.client.get(path), 503, "no_sample")
    assert corner.client.items(f"/v1/instances/{assignment.instance_id}/metrics") == []
    problem(corner.client.get("/v1/instances/none/metrics"), 404, "not_found")


def test_a_sample_from_before_a_gpu_changed_hands_does_not_tell_the_new_holder_of_the_old_one(
    corner: Corner,
) -> None:
    former = corner.running(gpus={"count": 1})
    process = {
        "pid": 7, "name": "/home/ada/secret-model", "memory_used_mib": 5, "instance_id": former.instance_id
    }  # fmt: skip
    nobodys = {**process, "name": "Xorg", "instance_id": None}
    sample = {
        "uuid": former.gpu_uuids[0], "index": 0, "sampled_at": "2026-11-21T08:00:00Z",
        "processes": [process, nobodys],
    }  # fmt: skip
    corner.sync(*corner.ran, samples=[sample])
    path = f"/v1/gpus/{former.gpu_uuids[0]}/metrics"
    with _member_of_another_project(corner) as other:
        problem(other.get(path), 403, "forbidden")
        corner.client.delete(f"/v1/instances/{former.instance_id}")
        corner.sync(samples=[sample])
        assert other.get(path).json()["processes"] == []  # nobody holds it
        made = other.create(node_selector={"corner": corner.node.name}, gpus={"count": 8})
        corner.made.append(made["id"])
        other.wait(made["id"], "scheduled")
        (shown,) = other.items(f"/v1/instances/{made['id']}/metrics")
        assert shown["processes"] == []
        own = {**process, "name": "mine", "instance_id": made["id"]}
        corner.sync(samples=[{**sample, "processes": [process, own]}])
        assert [one["name"] for one in other.get(path).json()["processes"]] == ["mine"]
    assert [one["name"] for one in corner.client.get(path).json()["processes"]] == [process["name"], "mine"]


@contextmanager
def _member_of_another_project(corner: Corner) -> Iterator[Client]:
    project = corner.client.post("/v1/projects", json={"name": f"other-{corner.node.name}"}).json()["id"]
    body = {"name": "k", "project_id": project, "role": "member"}
    with Client(corner.service.url, corner.client.post("/v1/api-keys", json=body).json()["key"]) as made:
        yield made
