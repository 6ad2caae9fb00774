"""The main path on two nodes with real Docker: a create starts a container with exactly its GPUs."""

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster
from tests.walk.product import AgentProcess

SMALL: dict[str, Any] = {"cpus": 0.1, "memory_mib": 64}


def test_a_create_becomes_a_container_with_exactly_its_gpus(admin: Client, cluster: Cluster) -> None:
    made = admin.create(
        name="train-1", gpus={"count": 2}, env={"EPOCHS": "3"}, ports=[{"container": 80}], labels={"a": "b"}
    )
    running = admin.wait(made["id"], "running")

    uuids = sorted(device["uuid"] for device in running["devices"])
    assert len(uuids) == 2
    node = cluster.agent_of(running).node
    container = node.client.containers.get(running["container_id"])
    requests = container.attrs["HostConfig"]["DeviceRequests"]
    assert sorted(uuid for request in requests for uuid in request["DeviceIDs"]) == uuids
    environment = dict(item.split("=", 1) for item in container.attrs["Config"]["Env"])
    assert sorted(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == uuids
    assert environment["EPOCHS"] == "3"
    assert container.labels["mooring.instance"] == made["id"]
    assert running["endpoints"][0]["host"] == node.address
    assert not running["simulated"]

    samples = wait_until(lambda: admin.items(f"/v1/instances/{made['id']}/metrics"))
    assert sorted(sample["uuid"] for sample in samples) == uuids
    assert all(sample["power_w"] > 0 for sample in samples)

    admin.delete(f"/v1/instances/{made['id']}")
    wait_until(lambda: admin.get(f"/v1/instances/{made['id']}").status_code == 404, 20)
    assert not node.client.containers.list(all=True)
    assert all(gpu["instance_id"] is None for gpu in admin.items("/v1/gpus"))


@pytest.fixture
def one_on_each_node(admin: Client, cluster: Cluster) -> list[dict[str, Any]]:
    """Two instances that need a whole node each."""
    command = [
        "sh",
        "-c",
        "echo out; echo err >&2; trap 'echo end; exit 0' TERM; while :; do sleep 0.05; done",
    ]
    made = [admin.create(gpus={"count": 8}, command=command) for _ in cluster.agents]
    running = [admin.wait(instance["id"], "running") for instance in made]
    assert {instance["node_name"] for instance in running} == {node.name for node in cluster.nodes}
    return running


def test_exec_and_logs_reach_both_nodes(admin: Client, one_on_each_node: list[dict[str, Any]]) -> None:
    for instance in one_on_each_node:
        path = f"/v1/instances/{instance['id']}"
        ran = admin.post(f"{path}/exec", json={"command": ["sh", "-c", "echo $MOORING_INSTANCE_ID; exit 3"]})
        assert ran.json() == {
            "exit_code": 3, "stdout": f"{instance['id']}\n", "stderr": "", "truncated": False,
        }  # fmt: skip
        logs = admin.get(f"{path}/logs")
        assert logs.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert sorted(logs.text.splitlines()) == ["err", "out"]


def test_followed_logs_end_with_the_container(admin: Client, one_on_each_node: list[dict[str, Any]]) -> None:
    here, there = one_on_each_node
    texts: list[str] = []
    events: list[dict[str, Any]] = []
    following = threading.Barrier(3)

    def follow_text() -> None:
        with admin.stream("GET", f"/v1/instances/{here['id']}/logs", params={"follow": True}) as answer:
            lines = answer.iter_lines()
            texts.append(next(lines))
            following.wait(20)
            texts.extend(lines)

    def follow_events() -> None:
        path, headers = f"/v1/instances/{there['id']}/logs", {"Accept": "text/event-stream"}
        with admin.stream("GET", path, params={"follow": True}, headers=headers) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data:"))
            events.append(json.loads(next(lines)[5:]))
            following.wait(20)
            events.extend(json.loads(line[5:]) for line in lines)

    threads = [threading.Thread(target=follow_text), threading.Thread(target=follow_events)]
    for thread in threads:
        thread.start()
    following.wait(20)
    for instance in one_on_each_node:
        admin.post(f"/v1/instances/{instance['id']}/stop")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a followed log did not end with its container"

    assert sorted(texts) == ["end", "err", "out"]
    assert sorted((event["stream"], event["line"]) for event in events) == [
        ("stderr", "err"),
        ("stdout", "end"),
        ("stdout", "out"),
    ]
    after = admin.get(f"/v1/instances/{here['id']}/logs", params={"tail": 1})
    # The logs of a stopped instance are kept until it is deleted.
    assert after.text == "end\n"


@pytest.mark.usefixtures("one_on_each_node")
def test_a_node_opens_no_port_for_the_control_plane(cluster: Cluster) -> None:
    for agent in cluster.agents:
        processes = [psutil.Process(agent.pid), *agent.children()]
        assert not [
            listening
            for process in processes
            for listening in process.net_connections("inet")
            if listening.status == psutil.CONN_LISTEN or (listening.type == 2 and not listening.raddr)
        ]
        assert not _listening_in_the_namespace_of(agent)


def _listening_in_the_namespace_of(agent: AgentProcess) -> list[str]:
    tables = [Path(f"/proc/{agent.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return [line for table in tables for line in table if line.split()[3] == "0A"]


def test_a_join_token_works_once(cluster: Cluster, tmp_path: Path) -> None:
    late = AgentProcess(cluster.nodes[0], cluster.server, tmp_path)
    late.forked = True
    late.environment["MOORING_NODE_NAME"] = "another"
    late.environment["MOORING_JOIN_TOKEN"] = cluster.agents[0].environment["MOORING_JOIN_TOKEN"]
    late.start()
    assert late.wait() == 4
    assert "join token" in late.printed()
    late.close()
    assert len(cluster.admin.items("/v1/nodes")) == len(cluster.agents)


def test_users_cannot_name_devices_in_env(admin: Client) -> None:
    answer = admin.post(
        "/v1/instances", json={"image": "mooring-test/busybox:1", "env": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["code"] == "reserved_env"


def test_an_image_that_requests_all_gpus_gets_only_allocated_ones(
    admin: Client, cluster: Cluster, cuda_env_image: str
) -> None:
    with_gpus = admin.create(image=cuda_env_image, gpus={"count": 3})
    without = admin.create(image=cuda_env_image, **SMALL)
    for made in (with_gpus, without):
        admin.wait(made["id"], "running")

    def visible(instance: dict[str, Any]) -> str:
        ran = admin.post(
            f"/v1/instances/{instance['id']}/exec",
            json={"command": ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]},
        )
        return str(ran.json()["stdout"]).strip()

    devices = admin.instance(with_gpus["id"])["devices"]
    assert sorted(visible(with_gpus).split(",")) == sorted(device["uuid"] for device in devices)
    assert len(cluster.container(with_gpus).requested) == 3
    assert visible(without) == "void"
    assert cluster.container(without).requested == ()


def test_64_clients_race_for_8_gpus(admin: Client, cluster: Cluster) -> None:
    node_id = admin.items("/v1/nodes", name=cluster.nodes[1].name)[0]["id"]
    assert admin.post(f"/v1/nodes/{node_id}/cordon").status_code == 200
    gate = threading.Barrier(64)
    ids: list[str] = []

    def race() -> None:
        with cluster.server.client as client:
            gate.wait()
            ids.append(client.create(gpus={"count": 1}, **SMALL)["id"])

    racers = [threading.Thread(target=race) for _ in range(64)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(set(ids)) == 64
    wait_until(lambda: len(admin.items("/v1/instances", state="running", limit=200)) == 8, 60)

    cluster.check()
    running = [found for found in cluster.containers() if found.runs]
    assert len(running) == 8
    assert {found.requested[0] for found in running} == set(cluster.agents[0].gpu_uuids)
    waiting = admin.items("/v1/instances", state="pending", limit=200)
    assert len(waiting) == 56
    # The eight may already run before the scheduler has written the reasons of the others.
    wait_until(
        lambda: (
            {each["reason"]["code"] for each in admin.items("/v1/instances", state="pending", limit=200)}
            == {"waiting_for_capacity"}
        )
    )
    for instance in waiting[8:]:
        admin.delete(f"/v1/instances/{instance['id']}")
    for found in running:
        admin.delete(f"/v1/instances/{found.instance}")
    for instance in waiting[:8]:
        admin.wait(instance["id"], "running", 60)
    assert admin.post(f"/v1/nodes/{node_id}/uncordon").status_code == 200
