"""The guard of placements: it binds volumes, and rejects plans that are older than a binding."""

import pytest

from mooring.control.instances import placements
from mooring.scheduler.model import Placement
from tests.nodes import WireNode
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases
NOWHERE = {"zone": "nowhere"}


def _pending(client: Client) -> str:
    """An instance that mounts the volume, and that the scheduling loop does not place."""
    mounts = [{"volume": "data", "path": "/data"}]
    made = client.create(volumes=mounts, node_selector=NOWHERE, cpus=1, memory_mib=64, disk_mib=64)
    wait_until(lambda: (client.instance(made["id"])["reason"] or {}).get("code") != "queued")
    return str(made["id"])


def _placement(instance_id: str, node: WireNode) -> Placement:
    return Placement(instance_id, node.id, (), 1000, 64, disk_mib=64)


def test_the_guard_rejects_a_placement_away_from_the_data(
    service: RunningService, client: Client, node: WireNode
) -> None:
    client.post("/v1/volumes", json={"name": "data"})
    other = WireNode(client, "gpu-2")
    for each in (node, other):
        disk = {"total_mib": 9000, "allocatable_mib": 9000, "available_mib": 9000, "enforced": True}
        each.facts = type(each.facts).model_validate(
            {**each.facts.model_dump(), "disk": {**disk, "driver": "x"}}
        )
        each.sync()
        client.post(f"/v1/nodes/{each.id}/approve", json={})
        each.sync()
    first, second, third = (_pending(client) for _ in range(3))
    plan = [_placement(first, node), _placement(second, other), _placement(third, node)]
    with service.plane.database.write() as session:
        assert placements.assign(session, plan) == [first, third], "in one plan"
    with service.plane.database.write() as session:
        assert placements.assign(session, [_placement(second, other)]) == [], "in a later one"
    assert client.items("/v1/volumes")[0]["node_id"] == node.id
    other.close()
