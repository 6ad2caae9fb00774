"""What a stolen node credential gives access to, and that it gives no more (findings 5 and 14)."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mooring.core.node import NodeFacts
from mooring.schemas.agent import Assignment, SyncAnswer
from tests.api.conftest import Corner
from tests.nodes import WireNode, seen
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

SECRET = "S3CRET-of-the-victim"
PASSWORD = "REGPASS-of-the-victim"
MARK = "env-of-the-victim"
REGISTRY = "registry.victim.example.com"


@pytest.fixture
def thief(corner: Corner, shared: Client) -> Iterator[WireNode]:
    """A node of one H100 that has joined and reported as its operator set it up."""
    made = WireNode(shared, f"thief-{corner.node.name}", gpus=1)
    made.facts = made.facts.model_copy(update={"labels": {"zone": "thief"}})
    made.sync()
    yield made
    shared.delete(f"/v1/nodes/{made.id}", params={"force": True})
    made.close()


def victims(corner: Corner) -> dict[str, Any]:
    """Fields of a create that names a secret, credentials of a registry and an env of the victim's."""
    name = f"token-{corner.node.name}"
    corner.client.post("/v1/secrets", json={"name": name, "value": SECRET})
    body = {"server": REGISTRY, "username": "ci", "password": PASSWORD}
    corner.client.post("/v1/registries", json=body)
    return {"image": f"{REGISTRY}/app:1", "env": {"TOKEN": {"secret": name}, "MARK": MARK}}


def shown(corner: Corner, node: WireNode) -> dict[str, Any]:
    return dict(corner.client.get(f"/v1/nodes/{node.id}").json())


def hears_nothing_of(answer: SyncAnswer, assignment: Assignment) -> None:
    text = answer.model_dump_json()
    assert answer.assignments == []
    assert answer.streams == []
    for canary in (SECRET, PASSWORD, MARK, REGISTRY, assignment.name, assignment.project_id):
        assert canary not in text
    # What it says that it holds and does not, it may remove: no more than it said is told of it.
    told = {"instance_id": assignment.instance_id, "attempt": assignment.attempt, "stop_timeout_s": 10}
    assert all(removal.model_dump() == told for removal in answer.removals)


def test_a_node_hears_of_its_own_instances_only(corner: Corner, thief: WireNode) -> None:
    fields = victims(corner)
    waiting, running = corner.placed(**fields), corner.running(gpus={"count": 1}, **fields)
    corner.client.post(f"/v1/instances/{running.instance_id}/stop", json={"timeout_s": 3333})
    assert shown(corner, corner.node)["state"] == "ready"
    for assignment in (waiting, running):
        for phase in ("starting", "running", "exited", "refused"):
            hears_nothing_of(thief.sync(seen(assignment, phase)), assignment)
        older = seen(assignment, "running").model_copy(update={"attempt": 0})
        answer = thief.sync(older)
        assert (answer.assignments, [gone.stop_timeout_s for gone in answer.removals]) == ([], [10])
        orphan = {
            "container_id": "c", "name": "n", "instance_id": assignment.instance_id, "control_plane_id": None
        }  # fmt: skip
        hears_nothing_of(thief.sync(orphans=[orphan]), assignment)
        hears_nothing_of(thief.sync(instances=None), assignment)
    assert corner.client.instance(waiting.instance_id)["state"] == "scheduled"


def test_a_node_hears_of_no_stream_of_another_node(corner: Corner, thief: WireNode) -> None:
    assignment = corner.running()
    answers: list[httpx.Response] = []
    path = f"/v1/instances/{assignment.instance_id}/exec"
    asking = threading.Thread(
        target=lambda: answers.append(corner.client.post(path, json={"command": [MARK]}))
    )
    asking.start()
    (stream,) = wait_until(lambda: corner.sync(seen(assignment, "running")).streams)
    hears_nothing_of(thief.sync(seen(assignment, "running")), assignment)
    frames = b'{"stream": "stdout", "text": "forged"}\n{"exit_code": 0}\n'
    problem(thief.http.post(f"/agent/v1/streams/{stream.id}", content=frames), 404, "not_found")
    assert corner.node.http.post(f"/agent/v1/streams/{stream.id}", content=frames).status_code == 204
    asking.join(20)
    assert answers[0].status_code == 200


def test_a_node_takes_only_its_own_gpus_out_of_use(corner: Corner, thief: WireNode) -> None:
    incidents = [
        {"id": f"i-{gpu.uuid}", "uuid": gpu.uuid, "code": "xid_79", "message": "no"}
        for gpu in (*corner.node.gpus, *thief.gpus)
    ]
    thief.sync(incidents=incidents)
    assert {gpu["health"] for gpu in shown(corner, corner.node)["gpus"]} == {"healthy"}
    assert [gpu["health"] for gpu in shown(corner, thief)["gpus"]] == ["quarantined"]


GROWTH: dict[str, dict[str, Any]] = {
    "labels": {"labels": {"zone": "thief", "tenant": "b"}},
    "label_value": {"labels": {"zone": "b"}},
    "cpus": {"cpus": 4096},
    "memory_mib": {"memory_mib": 2**30},
    "address": {"address": "6.6.6.6"},
    "swarm": {"swarm": {"cluster_id": "of-the-victims", "manager": True}},
    "simulated_gpus": {"simulated_gpus": True},
}


@pytest.mark.parametrize("facts", GROWTH.values(), ids=GROWTH.keys())
def test_a_node_that_reports_more_of_itself_gets_nothing(
    corner: Corner, thief: WireNode, facts: dict[str, Any]
) -> None:
    before = shown(corner, thief)
    honest = thief.facts
    thief.facts = NodeFacts.model_validate({**honest.model_dump(), **facts})
    thief.sync()
    after = shown(corner, thief)
    assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
    effective = ("labels", "cpus", "memory_mib", "address", "simulated")
    assert all(after[name] == before[name] or name == "labels" for name in effective)
    assert after["labels"].items() <= before["labels"].items()
    fields = {**victims(corner), "node_selector": facts.get("labels", {"zone": "thief"})}
    made = corner.client.create(**fields)
    corner.made.append(made["id"])
    wait_until(lambda: corner.client.instance(made["id"])["reason"]["code"] not in {"queued", "no_nodes"})
    answer = thief.sync()
    assert (answer.assignments, answer.overlays) == ([], [])
    assert SECRET not in answer.model_dump_json()
    thief.facts = honest
    thief.sync()
    assert shown(corner, thief)["state"] == "ready"


def test_a_node_cannot_make_up_gpus(corner: Corner, thief: WireNode) -> None:
    evil = thief.gpus[0].model_copy(update={"uuid": f"GPU-evil-{thief.name}", "index": 1})
    bigger = thief.gpus[0].model_copy(update={"memory_mib": 2**20})
    better = thief.gpus[0].model_copy(update={"model": "NVIDIA B200"})
    for gpus in ([*thief.gpus, evil], [bigger], [better]):
        thief.sync(gpus=gpus)
        after = shown(corner, thief)
        assert (after["state"], after["reason"]["code"]) == ("not_ready", "facts_changed")
        assert [(gpu["uuid"], gpu["model"], gpu["memory_mib"]) for gpu in after["gpus"]] == [
            (gpu.uuid, gpu.model, gpu.memory_mib) for gpu in thief.gpus
        ]


def test_a_claim_to_another_nodes_gpu_hurts_neither_node(corner: Corner, thief: WireNode) -> None:
    claimed = corner.node.gpus[0]
    corner.sync(gpus=corner.node.gpus[1:])  # it fell off the bus: the claim comes while it is lost
    for _ in range(2):
        thief.sync(gpus=[*thief.gpus, claimed])
    corner.sync()
    honest, after = shown(corner, corner.node), shown(corner, thief)
    assert (honest["state"], len(honest["gpus"])) == ("ready", 8)
    assert (after["state"], [gpu["uuid"] for gpu in after["gpus"]]) == ("ready", [thief.gpus[0].uuid])


def test_an_endpoint_is_at_the_nodes_approved_address(corner: Corner) -> None:
    assignment = corner.placed(ports=[{"container": 80}])
    forged = [
        {"container": 80, "protocol": "tcp", "host": "6.6.6.6", "port": 32768},
        {"container": 22, "protocol": "tcp", "host": "6.6.6.6", "port": 22},
        {"container": 80, "protocol": "udp", "host": "127.0.0.1", "port": 53},
        {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 70_000},
    ]
    corner.sync(seen(assignment, "running", endpoints=forged))
    assert corner.client.instance(assignment.instance_id)["endpoints"] == [
        {"container": 80, "protocol": "tcp", "host": "127.0.0.1", "port": 32768}
    ]


def test_what_a_node_says_of_an_instance_is_bounded(corner: Corner) -> None:
    assignment = corner.placed()
    forged = {"container_id": "x" * 4000 + "\u202e", "image_digest": "registry.evil/x\n@latest"}
    corner.sync(seen(assignment, "running", **forged))
    after = corner.client.instance(assignment.instance_id)
    assert (after["container_id"], after["image_digest"]) == (None, None)
    reason = {"code": "exited\u202enonzero", "message": "\u001b[31m" + "m" * 4000}
    corner.sync(seen(assignment, "exited", exit_code=-(2**31), reason=reason))
    after = corner.client.instance(assignment.instance_id)
    assert after["exit_code"] == 255
    assert len(after["reason"]["message"]) <= 2001
    assert "\u001b" not in after["reason"]["message"]
    assert "\u202e" not in after["reason"]["code"]


def test_a_node_gives_no_figures_of_another_nodes_gpu(corner: Corner, thief: WireNode) -> None:
    stolen = {
        "uuid": corner.node.gpus[0].uuid, "index": 0, "sampled_at": "2026-11-21T08:00:00Z", "power_w": 66_666,
    }  # fmt: skip
    thief.sync(samples=[stolen])
    assert "66666" not in corner.client.get("/metrics").text
    assert "6.6666e" not in corner.client.get("/metrics").text


def test_another_gpus_mig_device_is_not_listed_twice(corner: Corner, thief: WireNode) -> None:
    device = {"uuid": f"MIG-{corner.node.name}", "profile": "1g.10gb", "memory_mib": 9728}
    mig = {"mig_mode": "enabled", "mig_devices": [device]}
    for node in (corner.node, thief):
        node.gpus[0] = node.gpus[0].model_copy(update={"mig_mode": "disabled"})
        node.sync()
        corner.client.post(f"/v1/nodes/{node.id}/approve")
    corner.sync(gpus=[{**corner.node.gpus[0].model_dump(), **mig}, *corner.node.gpus[1:]])
    thief.sync(gpus=[{**thief.gpus[0].model_dump(), **mig}])
    (gpu,) = shown(corner, thief)["gpus"]
    assert gpu["mig_devices"] == []
    (own, *_others) = shown(corner, corner.node)["gpus"]
    assert [one["uuid"] for one in own["mig_devices"]] == [device["uuid"]]


def test_secrets_are_not_in_any_answer_to_a_report(corner: Corner) -> None:
    assignment = corner.placed(**victims(corner))
    for answer in (corner.sync(instances=None), corner.sync(seen(assignment, "starting"))):
        assert [item.instance_id for item in answer.assignments] == [assignment.instance_id]
        assert SECRET not in answer.model_dump_json()
        assert PASSWORD not in answer.model_dump_json()


def test_members_do_not_see_which_machine_to_attack(corner: Corner, shared: Client) -> None:
    corner.node.facts = corner.node.facts.model_copy(update={"overrides": ["allow_unsafe_toolkit"]})
    corner.sync()
    body = {"name": "k", "role": "member"}
    with Client(corner.service.url, shared.post("/v1/api-keys", json=body).json()["key"]) as member:
        for node in (
            member.get(f"/v1/nodes/{corner.node.id}").json(),
            *member.items("/v1/nodes", name=corner.node.name),
        ):
            assert (node["name"], node["state"], node["labels"]) == (
                corner.node.name, "ready", {"corner": corner.node.name}
            )  # fmt: skip
            assert (len(node["gpus"]), node["cpus"]) == (8, 64)
            assert (node["address"], node["hostname"], node["overrides"]) == (None, None, [])
            assert set(node["versions"].values()) == {None}
    admin = shown(corner, corner.node)
    assert (admin["address"], admin["overrides"]) == ("127.0.0.1", ["allow_unsafe_toolkit"])
    assert admin["versions"]["docker"] == "20.10.24"
