"""Node faults: a dead or frozen agent or Docker, lost reports, interference by others."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from docker.types import DeviceRequest

from mooring.agent.docker.create import container_name
from tests.service import Client
from tests.testbed.registry import Registry
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster
from tests.walk.product import AgentProcess
from tests.walk.test_operations import IGNORES_TERM, SMALL, freeze_in_mid_pull, holders

CREATE = r"POST /v[0-9.]+/containers/create"
START = r"POST /v[0-9.]+/containers/[0-9a-f]+/start"


@pytest.fixture
def agent(cluster: Cluster) -> Iterator[AgentProcess]:
    """The agent of the only node that is not cordoned."""
    other = cluster.admin.items("/v1/nodes", name=cluster.nodes[1].name)[0]["id"]
    cluster.admin.post(f"/v1/nodes/{other}/cordon")
    yield cluster.agents[0]
    cluster.admin.post(f"/v1/nodes/{other}/uncordon")


@pytest.fixture
def unaffected(admin: Client, cluster: Cluster, agent: AgentProcess) -> Iterator[dict[str, Any]]:
    """An instance on the node of `agent` that keeps running throughout the test."""
    made = admin.create(name="unaffected", gpus={"count": 2}, **SMALL)
    running = admin.wait(made["id"], "running")
    assert running["node_name"] == agent.node.name
    before = cluster.container(running)
    yield running
    cluster.restore()
    wait_until(lambda: admin.instance(made["id"])["state"] == "running", 30)
    assert cluster.container(running) == before


def node_of(admin: Client, agent: AgentProcess) -> dict[str, Any]:
    return admin.items("/v1/nodes", name=agent.node.name)[0]


def states_of(admin: Client, instance: dict[str, Any]) -> list[str]:
    events = admin.items(f"/v1/instances/{instance['id']}/events")
    return [event["data"]["to"] for event in events if event["type"] == "instance.state_changed"]


# --- the agent


@pytest.mark.usefixtures("unaffected")
def test_a_new_agent_adopts_running_containers(admin: Client, cluster: Cluster, agent: AgentProcess) -> None:
    made = admin.create(gpus={"count": 1}, **SMALL)
    admin.wait(made["id"], "running")
    before, children = cluster.container(made), agent.children()
    agent.kill()
    assert cluster.container(made) == before
    assert children, "a process that calls NVML"
    wait_until(lambda: not any(each.is_running() for each in children))
    agent.start()
    result = wait_until(lambda: _exec_result(admin, made), 30, 0.1)
    assert result["stdout"] == "here\n"
    assert cluster.container(made) == before
    admin.post(f"/v1/instances/{made['id']}/stop")
    assert admin.wait(made["id"], "stopped")["exit_code"] == 0


def _exec_result(admin: Client, instance: dict[str, Any]) -> dict[str, Any] | None:
    answer = admin.post(f"/v1/instances/{instance['id']}/exec", json={"command": ["echo", "here"]})
    return answer.json() if answer.status_code == 200 else None


@pytest.mark.usefixtures("unaffected")
@pytest.mark.parametrize("call", [CREATE, START])
def test_an_agent_killed_during_a_start_completes_it_once(
    admin: Client, cluster: Cluster, agent: AgentProcess, call: str
) -> None:
    killed = threading.Event()

    def kill() -> None:
        agent.kill()
        killed.set()

    agent.engine.after_next(call, kill)
    made = admin.create(gpus={"count": 1}, **SMALL)
    assert killed.wait(20)
    left = wait_until(lambda: [each for each in cluster.containers() if each.instance == made["id"]])
    agent.start()
    running = admin.wait(made["id"], "running")
    assert (running["attempt"], running["container_id"]) == (1, left[0].id)


@pytest.mark.usefixtures("unaffected")
def test_an_agent_killed_during_a_pull_pulls_again(
    admin: Client, cluster: Cluster, agent: AgentProcess, registry: Registry
) -> None:
    image = registry.add_image(f"killed-{uuid4().hex}", extra_layers=2, layer_bytes=8_000_000)
    made = admin.create(image=image, gpus={"count": 1}, **SMALL)
    freeze_in_mid_pull(registry, image)
    try:
        admin.wait(made["id"], "starting")
        agent.kill()
        agent.start()
    finally:
        registry.thaw()
    assert admin.wait(made["id"], "running")["attempt"] == 1
    assert cluster.container(made).runs


@pytest.mark.usefixtures("unaffected")
def test_the_older_of_two_agents_with_one_identity_ends(
    admin: Client, cluster: Cluster, agent: AgentProcess, tmp_path: Path
) -> None:
    twin = AgentProcess(agent.node, cluster.server, tmp_path)
    twin.forked = True
    shutil.copytree(agent.folder / "agent", tmp_path / "agent")
    twin.start()
    try:
        assert agent.wait() == 3
        assert "taken over" in agent.printed()
        made = admin.create(gpus={"count": 1}, **SMALL)
        admin.wait(made["id"], "running")
        assert cluster.container(made).runs
    finally:
        twin.close()


# --- Docker


def test_a_container_created_by_a_frozen_docker_is_adopted(
    admin: Client, cluster: Cluster, agent: AgentProcess, unaffected: dict[str, Any]
) -> None:
    frozen = threading.Event()

    def freeze() -> None:
        agent.node.freeze()
        frozen.set()

    agent.engine.before_next(CREATE, freeze)
    made = admin.create(gpus={"count": 1}, **SMALL)
    assert frozen.wait(20)
    node = wait_until(lambda: _not_ready(admin, agent), 40, 0.1)
    assert node["reason"]["code"] == "docker_unavailable"
    shown = admin.instance(made["id"])
    assert (shown["state"], shown["reason"]["code"]) == ("starting", "docker_unavailable")
    assert holders(admin) == {made["id"], unaffected["id"]}
    assert admin.instance(unaffected["id"])["state"] == "running"
    agent.node.thaw()
    running = admin.wait(made["id"], "running", 40)
    assert running["attempt"] == 1
    assert cluster.container(made).id == running["container_id"]
    wait_until(lambda: node_of(admin, agent)["state"] == "ready", 20)


def _not_ready(admin: Client, agent: AgentProcess) -> dict[str, Any] | None:
    node = node_of(admin, agent)
    return node if node["state"] == "not_ready" else None


def test_gpus_stay_allocated_while_docker_is_down(
    admin: Client, cluster: Cluster, agent: AgentProcess, unaffected: dict[str, Any]
) -> None:
    stopping = admin.create(gpus={"count": 1}, **SMALL)
    admin.wait(stopping["id"], "running")
    agent.node.kill()
    node = wait_until(lambda: _not_ready(admin, agent), 20, 0.05)
    assert node["reason"]["code"] == "docker_unavailable"
    admin.post(f"/v1/instances/{stopping['id']}/stop")
    waiting = admin.create(gpus={"count": 1}, **SMALL)
    reason = wait_until(lambda: _waiting_reason(admin, waiting), 10)
    assert node["name"] not in reason["message"] or "not" in reason["message"]
    assert admin.instance(stopping["id"])["state"] == "stopping"
    assert holders(admin) == {unaffected["id"], stopping["id"]}
    agent.node.start()
    assert admin.wait(stopping["id"], "stopped")["reason"]["code"] == "stopped_by_user"
    admin.wait(waiting["id"], "running")
    assert states_of(admin, unaffected)[-1] == "running"
    assert states_of(admin, unaffected).count("running") == 1


def _waiting_reason(admin: Client, instance: dict[str, Any]) -> dict[str, Any] | None:
    """The reason of a pending instance, once the scheduler has considered it."""
    shown = admin.instance(instance["id"])
    return shown["reason"] if shown["reason"]["code"] != "queued" else None


# --- missing reports


@pytest.fixture
def short_silence(cluster: Cluster) -> Iterator[None]:
    """A node is unreachable after two seconds without reports."""
    cluster.server.environment["MOORING_UNREACHABLE_AFTER_S"] = "2"
    cluster.server.stop()
    cluster.server.start()
    cluster.ready()
    yield
    del cluster.server.environment["MOORING_UNREACHABLE_AFTER_S"]
    cluster.restore()
    cluster.server.stop()
    cluster.server.start()


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("fault", ["agent stopped", "agent frozen", "network cut"])
def test_a_silent_node_keeps_everything_until_it_reports_again(
    admin: Client, cluster: Cluster, agent: AgentProcess, unaffected: dict[str, Any], fault: str
) -> None:
    stopping = admin.create(gpus={"count": 1}, **SMALL)
    admin.wait(stopping["id"], "running")
    faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "agent stopped": (agent.stop, agent.start),
        "agent frozen": (agent.freeze, agent.thaw),
        "network cut": (agent.node.disconnect, agent.node.reconnect),
    }
    begin, end = faults[fault]
    begin()
    wait_until(lambda: admin.instance(unaffected["id"])["state"] == "unreachable", 20, 0.05)
    assert node_of(admin, agent)["state"] == "unreachable"
    assert admin.instance(unaffected["id"])["reason"]["code"] == "node_unreachable"
    assert admin.post(f"/v1/instances/{stopping['id']}/stop").status_code == 202
    assert admin.post(f"/v1/instances/{unaffected['id']}/exec", json={"command": ["id"]}).status_code == 503
    assert holders(admin) == {unaffected["id"], stopping["id"]}
    assert cluster.container(stopping).runs
    end()
    assert admin.wait(stopping["id"], "stopped", 40)["reason"]["code"] == "stopped_by_user"
    wait_until(lambda: admin.instance(unaffected["id"])["state"] == "running", 20)
    assert states_of(admin, unaffected)[-3:] == ["running", "unreachable", "running"]


# --- containers made or ended by other programs


def test_an_orphan_is_listed_and_left_alone(admin: Client, cluster: Cluster, agent: AgentProcess) -> None:
    identity = json.loads((agent.folder / "agent" / "node.json").read_text())
    labels = {
        "mooring.instance": "ins_00000000000000000000000000",
        "mooring.attempt": "1",
        "mooring.control_plane": identity["control_plane_id"],
        "mooring.gpus": ",".join(agent.gpu_uuids),
    }
    all_gpus = DeviceRequest(driver="nvidia", device_ids=agent.gpu_uuids, capabilities=[["gpu"]])
    # The agent only recognizes containers with its names and restrictions.
    orphans = {
        container_name(labels["mooring.instance"], 1): labels,
        f"foreign-{uuid4().hex}": {**labels, "mooring.control_plane": "cpl_another", "mooring.gpus": ""},
    }
    api = agent.node.client.api
    made_ids = set()
    for name, labels_of_orphan in orphans.items():
        gpus = [all_gpus] if labels_of_orphan["mooring.gpus"] else []
        created = api.create_container(
            "mooring-test/busybox:1",
            name=name,
            labels=labels_of_orphan,
            host_config=api.create_host_config(
                device_requests=gpus,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                network_mode="host",
            ),
        )
        api.start(created["Id"])
        made_ids.add(created["Id"])
        cluster.foreign.add(name)
    try:
        wait_until(
            lambda: {item["container_id"] for item in node_of(admin, agent)["orphans"]} == made_ids, 20
        )
        # Until the orphan runs, it uses no GPUs.
        wait_until(lambda: _gpus_of_orphans(admin, agent) == agent.gpu_uuids, 20)
        made = admin.create(gpus={"count": 8}, **SMALL)
        wait_until(lambda: _reason_code(admin, made) == "waiting_for_capacity", 20)
        assert {each.name for each in cluster.containers() if each.runs} == set(orphans)
    finally:
        for name in orphans:
            api.remove_container(name, force=True)
            cluster.foreign.discard(name)
    admin.wait(made["id"], "running")
    wait_until(lambda: not node_of(admin, agent)["orphans"], 20)


def _gpus_of_orphans(admin: Client, agent: AgentProcess) -> list[str]:
    return [uuid for orphan in node_of(admin, agent)["orphans"] for uuid in orphan["gpu_uuids"]]


def _reason_code(admin: Client, instance: dict[str, Any]) -> str | None:
    return (admin.instance(instance["id"])["reason"] or {}).get("code")


@pytest.mark.usefixtures("unaffected")
def test_a_container_removed_or_killed_by_others_has_failed(
    admin: Client, cluster: Cluster, agent: AgentProcess
) -> None:
    removed, killed = (admin.create(gpus={"count": 1}, **SMALL) for _ in range(2))
    for made in (removed, killed):
        admin.wait(made["id"], "running")
    agent.node.client.api.remove_container(cluster.container(removed).id, force=True)
    agent.node.client.api.kill(cluster.container(killed).id)
    assert admin.wait(removed["id"], "failed")["reason"]["code"] == "container_lost"
    ended = admin.wait(killed["id"], "failed")
    assert (ended["reason"]["code"], ended["exit_code"]) == ("killed", 137)
    assert not {removed["id"], killed["id"]} & holders(admin)


@pytest.mark.usefixtures("unaffected")
def test_a_container_removed_while_it_is_being_stopped_is_stopped(
    admin: Client, cluster: Cluster, agent: AgentProcess
) -> None:
    made = admin.create(command=IGNORES_TERM, gpus={"count": 1}, **SMALL)
    admin.wait(made["id"], "running")
    admin.post(f"/v1/instances/{made['id']}/stop", json={"timeout_s": 60})
    agent.node.client.api.remove_container(cluster.container(made).id, force=True)
    assert admin.wait(made["id"], "stopped")["reason"]["code"] == "stopped_by_user"


@pytest.mark.usefixtures("unaffected")
def test_a_container_removed_while_the_agent_was_down_is_not_started_again(
    admin: Client, cluster: Cluster, agent: AgentProcess
) -> None:
    made = admin.create(gpus={"count": 1}, restart="always", **SMALL)
    admin.wait(made["id"], "running")
    agent.kill()
    agent.node.client.api.remove_container(cluster.container(made).id, force=True)
    agent.start()
    assert admin.wait(made["id"], "failed")["reason"]["code"] == "container_lost"
    assert not [found for found in cluster.containers() if found.instance == made["id"]]
