"""The life of volumes: with an agent on a simulated engine, and with nodes that are lost and return."""

from pathlib import Path
from typing import Any

import pytest

from mooring.control.nodes import nodes
from tests.nodes import WireNode, observed, simulated_node
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases


def _volume(client: Client, volume_id: str) -> dict[str, Any]:
    return dict(client.get(f"/v1/volumes/{volume_id}").json())


def _make(client: Client, name: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/volumes", json={"name": name, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_an_agent_creates_reports_and_removes_volumes(client: Client, tmp_path: Path) -> None:
    data, cache = _make(client, "data", size_mib=7), _make(client, "cache", driver="cache")
    mounts = [{"volume": "data", "path": "/data"}, {"volume": cache["id"], "path": "/cache"}]
    with simulated_node(client, tmp_path / "node", "sim-1") as node:
        first = client.create(command=["sleep", "600"], volumes=mounts)
        client.wait(first["id"], "running")
        wait_until(lambda: _volume(client, data["id"])["size_enforced"])
        assert _volume(client, data["id"])["node_id"] == node.id
        client.delete(f"/v1/instances/{first['id']}")
        client.wait(first["id"], "deleted")
        for each in (data, cache):
            assert client.delete(f"/v1/volumes/{each['id']}").status_code == 202
        wait_until(lambda: client.get(f"/v1/volumes/{data['id']}").status_code == 404)
        wait_until(lambda: client.get(f"/v1/volumes/{cache['id']}").status_code == 404)
        assert list(node.runtime.volumes()) == []


def test_a_lost_node_makes_its_volumes_unavailable_until_it_returns(
    service: RunningService, client: Client, node: WireNode
) -> None:
    data = _make(client, "data")
    instance = client.create(volumes=[{"volume": "data", "path": "/data"}])
    client.wait(instance["id"], "scheduled")
    (assignment,) = node.sync(instances=None).assignments
    node.sync(observed(assignment, "exited", exit_code=0))
    other = WireNode(client, "gpu-2")
    other.sync()
    with service.plane.database.write() as session:
        nodes.mark_unreachable(session, node.id)
    assert _volume(client, data["id"])["state"] == "unavailable"
    client.post(f"/v1/instances/{instance['id']}/start")

    def reason() -> str:
        return str((client.instance(instance["id"])["reason"] or {}).get("message"))

    wait_until(lambda: "the only suitable node, gpu-1, is unreachable; volume data is on gpu-1" in reason())
    node.sync()
    assert client.wait(instance["id"], "scheduled")["node_id"] == node.id
    assert _volume(client, data["id"])["state"] == "available"
    other.close()


def test_a_returning_node_removes_what_was_deleted_meanwhile(
    service: RunningService, client: Client, node: WireNode
) -> None:
    data = _make(client, "data")
    instance = client.create(volumes=[{"volume": "data", "path": "/data"}])
    client.wait(instance["id"], "scheduled")
    (assignment,) = node.sync(instances=None).assignments
    has_it = [{"volume_id": data["id"]}]
    node.sync(observed(assignment, "exited", exit_code=0), volumes=has_it)
    client.delete(f"/v1/instances/{instance['id']}")
    with service.plane.database.write() as session:
        nodes.mark_unreachable(session, node.id)
    assert client.delete(f"/v1/volumes/{data['id']}").json()["state"] == "deleting"
    body = {"image": "mooring-test/busybox:1", "volumes": [{"volume": data["id"], "path": "/data"}]}
    problem(client.post("/v1/instances", json=body), 422, "unknown_volume")
    assert _volume(client, data["id"])["state"] == "deleting"
    node.open_session()
    assert node.sync(volumes=has_it).volume_removals == [data["id"]]
    node.sync(volumes=[])
    problem(client.get(f"/v1/volumes/{data['id']}"), 404)


def test_two_pending_instances_follow_the_node_of_the_first(client: Client, node: WireNode) -> None:
    other = WireNode(client, "gpu-2")
    other.sync()
    data = _make(client, "data")
    mounts = [{"volume": "data", "path": "/data"}]
    ids = [client.create(volumes=mounts, gpus={"count": 5})["id"] for _ in range(2)]
    scheduled = wait_until(lambda: [each for each in ids if client.instance(each)["state"] == "scheduled"])
    (waiting,) = set(ids) - set(scheduled)
    where = client.instance(scheduled[0])["node_name"]

    def reason() -> str:
        return str((client.instance(waiting)["reason"] or {}).get("message"))

    wait_until(lambda: f"volume data is on {where}" in reason())
    refusals = client.get(f"/v1/instances/{waiting}/explain").json()["refusals"]
    elsewhere = [each["code"] for each in refusals if each["node_name"] != where]
    assert elsewhere == ["volume_elsewhere"]
    assert _volume(client, data["id"])["node_name"] == where
    other.close()


def test_quotas_count_volumes_until_their_nodes_have_removed_them(client: Client, node: WireNode) -> None:
    project = client.get("/v1/projects").json()["items"][0]["id"]
    client.patch(f"/v1/projects/{project}", json={"quotas": {"volumes_mib": 100}})
    first = _make(client, "first", size_mib=60)
    found = problem(client.post("/v1/volumes", json={"name": "b", "size_mib": 41}), 403, "quota_exceeded")
    assert (found["quota"], found["limit"], found["used"], found["asked"]) == ("volumes_mib", 100, 60, 41)
    assert client.get(f"/v1/projects/{project}").json()["usage"]["volumes_mib"] == 60
    path = f"/v1/volumes/{first['id']}"
    problem(client.patch(path, json={"size_mib": 101}), 403, "quota_exceeded")
    assert client.patch(path, json={"size_mib": 100}).status_code == 200
    problem(client.post("/v1/volumes", json={"name": "b", "size_mib": 1}), 403, "quota_exceeded")
    assert client.post("/v1/volumes", json={"name": "c", "driver": "cache"}).status_code == 403


def test_only_admins_create_nfs_volumes(client: Client) -> None:
    project = client.get("/v1/projects").json()["items"][0]["id"]
    made = client.post("/v1/api-keys", json={"name": "m", "project_id": project, "role": "owner"}).json()
    options = {"server": "nas-1", "path": "/export"}
    body = {"name": "home", "driver": "nfs", "options": options}
    with Client(str(client.base_url), key=made["key"]) as owner:
        problem(owner.post("/v1/volumes", json=body), 403, "nfs_not_allowed")
        problem(owner.put("/v1/volumes/by-name/home", json=body), 403, "nfs_not_allowed")
        created = client.post("/v1/volumes", json={**body, "project_id": project})
        assert created.status_code == 201
        again = owner.put("/v1/volumes/by-name/home", json=body)
        assert again.headers["Mooring-Applied"] == "unchanged"
