"""A node is cut off, and its replaceable instance continues on another node. Real containers."""

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until
from tests.walk.checker import Found
from tests.walk.conftest import Cluster, NewServer

LOST_AFTER_S = 15


@pytest.fixture
def lossy_cluster(
    new_server: NewServer, docker_nodes: Callable[[int], list[DockerNode]], tmp_path: Path
) -> Iterator[Cluster]:
    """A cluster of two nodes in which a node soon counts as lost."""
    settings = {"MOORING_UNREACHABLE_AFTER_S": "3", "MOORING_LOST_AFTER_S": str(LOST_AFTER_S)}
    nodes = docker_nodes(2)
    made = Cluster(new_server(**settings), nodes, tmp_path)
    yield made
    made.restore()
    made.ready()
    made.check()
    made.clear()
    made.close()
    for node in nodes:
        node.remove_containers()


def test_an_instance_runs_on_one_node_at_a_time(lossy_cluster: Cluster) -> None:
    cluster, admin = lossy_cluster, lossy_cluster.admin
    spec = {"image": images.BUSYBOX, "command": ["sleep", "1000"], "gpus": {"count": 8}}
    kept = admin.create(**spec, name="kept")
    admin.wait(kept["id"], "running")
    replaced = admin.create(**spec, name="replaced", on_node_loss="replace", restart="always")
    first = admin.wait(replaced["id"], "running")
    agent = cluster.agent_of(first)
    old = cluster.container(first)
    other = cluster.agent_of(admin.instance(kept["id"]))
    admin.delete(f"/v1/instances/{kept['id']}")
    wait_until(lambda: not admin.items("/v1/instances", name="kept"), 20)

    agent.node.disconnect()
    wait_until(lambda: admin.instance(replaced["id"])["attempt"] == 2, LOST_AFTER_S * 3)
    second = admin.wait(replaced["id"], "running")
    assert second["node_name"] == other.node.name
    found = {each.attempt: each for each in cluster.containers() if each.instance == replaced["id"]}
    assert (found[1].runs, found[2].runs) == (False, True)
    ended_at, started_at = _time(agent.node, found[1], "FinishedAt"), _time(other.node, found[2], "StartedAt")
    assert ended_at < started_at
    # The GPUs of the lost node stay allocated until it has confirmed that nothing runs there.
    assert len(_gpus_of(cluster, replaced["id"])) == 16

    agent.node.reconnect()
    wait_until(lambda: len(_gpus_of(cluster, replaced["id"])) == 8, 40)
    assert cluster.container(second).attempt == 2
    assert old.id not in {each.id for each in cluster.containers()}


def _time(node: DockerNode, container: Found, name: str) -> datetime:
    text: str = node.client.api.inspect_container(container.id)["State"][name]
    return datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00")


def _gpus_of(cluster: Cluster, instance_id: str) -> list[str]:
    listed = cluster.admin.items("/v1/gpus", limit=200)
    return [each["uuid"] for each in listed if each["instance_id"] == instance_id]
