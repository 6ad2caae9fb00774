"""GPUs: inventory, health and samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mooring.control.nodes import nodes
from tests.api.conftest import Sandbox
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until


def _gpu(sandbox: Sandbox, index: int) -> dict[str, Any]:
    return dict(sandbox.client.get(f"/v1/gpus/{sandbox.node.gpus[index].uuid}").json())


def _health(sandbox: Sandbox, index: int) -> tuple[str, str | None]:
    shown = _gpu(sandbox, index)
    return shown["health"], (shown["reason"] or {}).get("code")


def _incident(sandbox: Sandbox, index: int, number: str, code: str = "xid_79") -> dict[str, str]:
    return {"id": number, "uuid": sandbox.node.gpus[index].uuid, "code": code, "message": "what happened"}


def test_a_gpu_shows_the_facts_that_its_node_reports(sandbox: Sandbox) -> None:
    peer = {"uuid": sandbox.node.gpus[1].uuid, "links": 18}
    facts: dict[str, Any] = {
        "pci_bus_id": "00000000:1B:00.0",
        "numa_node": 0,
        "compute_capability": "9.0",
        "mig_mode": "disabled",
        "nvlink_peers": [peer],
    }
    sandbox.sync(gpus=[{**sandbox.node.gpus[0].model_dump(), **facts}, *sandbox.node.gpus[1:]])
    shown = _gpu(sandbox, 0)
    assert {key: shown[key] for key in facts} == facts
    assert (shown["node_name"], shown["index"], shown["simulated"]) == (sandbox.node.name, 0, False)
    assert _gpu(sandbox, 1)["numa_node"] is None  # an unreported value is null, never 0
    problem(sandbox.client.get("/v1/gpus/GPU-none"), 404, "not_found")
    problem(sandbox.client.get("/v1/gpus/GPU-none/metrics"), 404, "not_found")
    problem(sandbox.client.post("/v1/gpus/GPU-none/clear"), 404, "not_found")


def test_a_missing_gpu_is_lost_and_quarantined_after_its_return(sandbox: Sandbox) -> None:
    all_gpus = sandbox.node.gpus
    sandbox.sync(gpus=all_gpus[1:])
    assert _health(sandbox, 0) == ("lost", "gpu_missing")
    problem(sandbox.client.post(f"/v1/gpus/{all_gpus[0].uuid}/clear"), 409, "gpu_lost")
    sandbox.sync(gpus=None)  # an unknown list neither removes nor returns a GPU
    assert _health(sandbox, 0) == ("lost", "gpu_missing")
    for _ in range(2):
        sandbox.sync(gpus=all_gpus)
        assert _health(sandbox, 0) == ("quarantined", "gpu_returned")
    waiting = sandbox.create(gpus={"count": 8})["id"]
    _require_not_placed(sandbox, waiting)
    cleared = sandbox.client.post(f"/v1/gpus/{all_gpus[0].uuid}/clear")
    assert (cleared.json()["health"], cleared.json()["reason"]) == ("healthy", None)
    sandbox.sync(gpus=all_gpus)
    assert _health(sandbox, 0) == ("healthy", None)
    sandbox.client.wait(waiting, "scheduled")


def _require_not_placed(sandbox: Sandbox, instance_id: str) -> None:
    """Fails if the scheduler places the pending instance."""
    wait_until(lambda: (sandbox.client.instance(instance_id)["reason"] or {}).get("code") != "queued")
    assert sandbox.client.instance(instance_id)["state"] == "pending"


def test_a_lost_gpu_stays_allocated_until_its_instance_ends(sandbox: Sandbox) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    sandbox.sync(observed(assignment, "running"), gpus=sandbox.node.gpus[1:])
    assert _health(sandbox, 0) == ("lost", "gpu_missing")
    assert _gpu(sandbox, 0)["instance_id"] == assignment.instance_id
    sandbox.sync(observed(assignment, "exited", exit_code=1), gpus=sandbox.node.gpus[1:])
    assert _gpu(sandbox, 0)["instance_id"] is None
    sandbox.placed(gpus={"count": 7})
    _require_not_placed(sandbox, sandbox.create(gpus={"count": 1})["id"])


def test_a_fault_quarantines_a_gpu_until_it_is_repaired_and_cleared(sandbox: Sandbox) -> None:
    broken = sandbox.node.gpus[0].model_copy(update={"fault": "reset_required"})
    sandbox.sync(gpus=[broken, *sandbox.node.gpus[1:]])
    assert _health(sandbox, 0) == ("quarantined", "reset_required")
    sandbox.client.post(f"/v1/gpus/{broken.uuid}/clear")
    sandbox.sync(gpus=[broken, *sandbox.node.gpus[1:]])
    assert _health(sandbox, 0) == ("quarantined", "reset_required")
    sandbox.sync()  # the GPU is repaired, but an admin must still clear it
    assert _health(sandbox, 0) == ("quarantined", "reset_required")
    sandbox.client.post(f"/v1/gpus/{broken.uuid}/clear")
    sandbox.sync()
    assert _health(sandbox, 0) == ("healthy", None)


def test_an_incident_counts_once_however_often_it_is_reported(sandbox: Sandbox) -> None:
    first, second = _incident(sandbox, 0, "a"), _incident(sandbox, 0, "b", "xid_48")
    other = _incident(sandbox, 1, "c")
    sandbox.sync(incidents=[first, other, second])
    assert _health(sandbox, 0) == ("quarantined", "xid_48")
    sandbox.client.post(f"/v1/gpus/{first['uuid']}/clear")
    sandbox.sync(incidents=[first, other, second])  # the node repeats them, since the answer was lost
    assert _health(sandbox, 0) == ("healthy", None)
    sandbox.sync(incidents=[first, other, second, _incident(sandbox, 0, "d")])
    assert _health(sandbox, 0) == ("quarantined", "xid_79")
    assert _health(sandbox, 1) == ("quarantined", "xid_79")
    transitions = [
        (event["data"]["from"], event["data"]["to"])
        for event in _events(sandbox.client)
        if event["data"].get("gpu_uuid") == first["uuid"]
    ]
    assert transitions == [
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


def test_a_quarantined_gpu_is_not_allocated(sandbox: Sandbox) -> None:
    sandbox.sync(incidents=[_incident(sandbox, index, f"i-{index}") for index in range(7)])
    first, second = sandbox.placed(gpus={"count": 1}), sandbox.create(gpus={"count": 1})
    assert first.gpu_uuids == [sandbox.node.gpus[7].uuid]
    sandbox.client.post(f"/v1/gpus/{sandbox.node.gpus[3].uuid}/clear")
    sandbox.client.wait(second["id"], "scheduled")
    assert sandbox.assignment(second["id"]).gpu_uuids == [sandbox.node.gpus[3].uuid]


def test_a_gpu_that_two_nodes_report_stays_with_its_approved_node(sandbox: Sandbox, shared: Client) -> None:
    twin = WireNode(shared, f"twin-{sandbox.node.name}", gpus=1)
    both = [sandbox.node.gpus[0], twin.gpus[0]]
    for _ in range(3):
        twin.sync(gpus=both)
    shown = shared.get(f"/v1/nodes/{twin.id}").json()
    assert (shown["state"], shown["reason"]) == ("ready", None)
    assert [gpu["uuid"] for gpu in shown["gpus"]] == [twin.gpus[0].uuid]
    (change,) = shown["facts_changed"]["changes"]
    assert (change["fact"], change["gpu_uuid"], change["node_id"]) == ("gpu", both[0].uuid, sandbox.node.id)
    assert _gpu(sandbox, 0)["node_id"] == sandbox.node.id
    claims = [event["data"] for event in _events(shared) if event["type"] == "gpu.claimed"]
    assert [claim for claim in claims if claim["claimed_by"] == twin.id] == [
        {"gpu_uuid": both[0].uuid, "node_id": sandbox.node.id, "claimed_by": twin.id}
    ]
    # An admin approves that the GPU was moved to another machine.
    sandbox.sync(gpus=sandbox.node.gpus[1:])
    twin.sync(gpus=both)
    assert _gpu(sandbox, 0)["node_id"] == sandbox.node.id
    approved = shared.post(f"/v1/nodes/{twin.id}/approve")
    assert (approved.status_code, approved.json()["facts_changed"]) == (200, None)
    twin.sync(gpus=both)
    moved = _gpu(sandbox, 0)
    assert (moved["node_id"], moved["health"]) == (twin.id, "quarantined")
    sandbox.sync()
    assert shared.get(f"/v1/nodes/{sandbox.node.id}").json()["state"] == "ready"
    assert _gpu(sandbox, 0)["node_id"] == twin.id
    shared.delete(f"/v1/nodes/{twin.id}")
    sandbox.sync()
    assert shared.get(f"/v1/nodes/{sandbox.node.id}").json()["reason"]["code"] == "facts_changed"
    shared.post(f"/v1/nodes/{sandbox.node.id}/approve")
    sandbox.sync()
    assert _gpu(sandbox, 0)["node_id"] == sandbox.node.id
    twin.close()


def test_an_allocated_gpu_cannot_be_approved_for_another_node(sandbox: Sandbox, shared: Client) -> None:
    assignment = sandbox.running(gpus={"count": 8})
    sandbox.sync(observed(assignment, "running"), gpus=[])
    twin = WireNode(shared, f"held-{sandbox.node.name}", gpus=0)
    twin.sync(gpus=[sandbox.node.gpus[0]])
    problem(shared.post(f"/v1/nodes/{twin.id}/approve"), 409, "gpu_in_use")
    assert _gpu(sandbox, 0)["node_id"] == sandbox.node.id
    shared.delete(f"/v1/nodes/{twin.id}")
    twin.close()


def test_a_gpu_reported_twice_is_one_gpu(sandbox: Sandbox) -> None:
    sandbox.sync(gpus=[*sandbox.node.gpus, sandbox.node.gpus[0]])
    new = sandbox.node.gpus[0].model_copy(update={"uuid": f"{sandbox.node.gpus[0].uuid}-new"})
    for _ in range(2):
        sandbox.sync(gpus=[*sandbox.node.gpus, new, new])
        sandbox.client.post(f"/v1/nodes/{sandbox.node.id}/approve")
    assert len(sandbox.client.items("/v1/gpus", node_id=sandbox.node.id)) == 9


def test_samples_are_shown_while_the_node_is_reachable(sandbox: Sandbox) -> None:
    sample = {
        "uuid": sandbox.node.gpus[0].uuid,
        "index": 0,
        "sampled_at": "2026-11-21T08:00:00Z",
        "power_w": 71.5,
    }
    path = f"/v1/gpus/{sample['uuid']}/metrics"
    assert problem(sandbox.client.get(path), 503, "no_sample")["retryable"] is True
    assignment = sandbox.running(gpus={"count": 8})
    sandbox.sync(observed(assignment, "running"), samples=[sample])
    shown = sandbox.client.get(path).json()
    assert (shown["power_w"], shown["temperature_c"], shown["processes"]) == (71.5, None, None)
    of_instance = sandbox.client.items(f"/v1/instances/{assignment.instance_id}/metrics")
    assert [item["uuid"] for item in of_instance] == [sample["uuid"]]
    listed = sandbox.client.items("/v1/gpus", node_id=sandbox.node.id, samples=True)
    assert {gpu["uuid"]: gpu["sample"] for gpu in listed if gpu["sample"]} == {sample["uuid"]: shown}
    assert not any(gpu["sample"] for gpu in sandbox.client.items("/v1/gpus", node_id=sandbox.node.id))
    with sandbox.service.plane.database.write() as session:
        nodes.mark_unreachable(session, sandbox.node.id)
    problem(sandbox.client.get(path), 503, "no_sample")
    assert sandbox.client.items(f"/v1/instances/{assignment.instance_id}/metrics") == []
    problem(sandbox.client.get("/v1/instances/none/metrics"), 404, "not_found")


def test_an_old_sample_does_not_show_the_previous_holder_of_a_gpu(
    sandbox: Sandbox,
) -> None:
    former = sandbox.running(gpus={"count": 1})
    process = {
        "pid": 7, "name": "/home/ada/secret-model", "memory_used_mib": 5, "instance_id": former.instance_id
    }  # fmt: skip
    of_no_instance = {**process, "name": "Xorg", "instance_id": None}
    sample = {
        "uuid": former.gpu_uuids[0], "index": 0, "sampled_at": "2026-11-21T08:00:00Z",
        "processes": [process, of_no_instance],
    }  # fmt: skip
    sandbox.sync(*sandbox.reported, samples=[sample])
    path = f"/v1/gpus/{former.gpu_uuids[0]}/metrics"
    with _member_of_another_project(sandbox) as other:
        problem(other.get(path), 403, "forbidden")
        listed = other.items("/v1/gpus", node_id=sandbox.node.id, samples=True)
        assert not any(gpu["sample"] for gpu in listed)
        sandbox.client.delete(f"/v1/instances/{former.instance_id}")
        sandbox.sync(samples=[sample])
        assert other.get(path).json()["processes"] == []  # the GPU is not allocated
        made = other.create(node_selector={"sandbox": sandbox.node.name}, gpus={"count": 8})
        sandbox.created_ids.append(made["id"])
        other.wait(made["id"], "scheduled")
        (shown,) = other.items(f"/v1/instances/{made['id']}/metrics")
        assert shown["processes"] == []
        own = {**process, "name": "own-model", "instance_id": made["id"]}
        sandbox.sync(samples=[{**sample, "processes": [process, own]}])
        assert [each["name"] for each in other.get(path).json()["processes"]] == ["own-model"]
    assert [each["name"] for each in sandbox.client.get(path).json()["processes"]] == [
        process["name"],
        "own-model",
    ]


@contextmanager
def _member_of_another_project(sandbox: Sandbox) -> Iterator[Client]:
    project = sandbox.client.post("/v1/projects", json={"name": f"other-{sandbox.node.name}"}).json()["id"]
    body = {"name": "k", "project_id": project, "role": "member"}
    with Client(sandbox.service.url, sandbox.client.post("/v1/api-keys", json=body).json()["key"]) as made:
        yield made
