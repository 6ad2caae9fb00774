"""The main job, whole and real: a call becomes a container that holds exactly its GPUs."""

from typing import Any

from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.product import AgentProcess

IMAGE = "mooring-test/busybox:1"


def requested_gpus(agent: AgentProcess, container_id: str) -> list[str]:
    """The UUIDs in the container's device request, as Docker's own API has them."""
    attributes: dict[str, Any] = agent.node.client.api.inspect_container(container_id)
    requests = attributes["HostConfig"]["DeviceRequests"] or []
    return sorted(uuid for request in requests for uuid in request["DeviceIDs"])


def test_a_create_becomes_a_container_with_exactly_its_gpus(admin: Client, agent: AgentProcess) -> None:
    made = admin.create(
        name="train-1",
        command=["sleep", "1000"],
        gpus={"count": 2},
        env={"EPOCHS": "3"},
        ports=[{"container": 80}],
    )
    running = admin.wait(made["id"], "running")

    uuids = sorted(device["uuid"] for device in running["devices"])
    assert len(uuids) == 2
    assert requested_gpus(agent, running["container_id"]) == uuids
    container = agent.node.client.containers.get(running["container_id"])
    environment = dict(item.split("=", 1) for item in container.attrs["Config"]["Env"])
    assert sorted(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == uuids
    assert environment["EPOCHS"] == "3"
    assert container.labels["mooring.instance"] == made["id"]
    assert running["endpoints"][0]["host"] == agent.node.address
    assert not running["simulated"]

    samples = admin.items(f"/v1/instances/{made['id']}/metrics")
    assert sorted(sample["uuid"] for sample in samples) == uuids
    assert all(sample["power_w"] > 0 for sample in samples)

    answer = admin.post(
        f"/v1/instances/{made['id']}/exec", json={"command": ["sh", "-c", "echo out; exit 3"]}
    )
    assert answer.json() == {"exit_code": 3, "stdout": "out\n", "stderr": "", "truncated": False}

    admin.delete(f"/v1/instances/{made['id']}")
    wait_until(lambda: admin.get(f"/v1/instances/{made['id']}").status_code == 404, 20)
    assert not agent.node.client.containers.list(all=True)
    assert all(gpu["instance_id"] is None for gpu in admin.items("/v1/gpus"))
