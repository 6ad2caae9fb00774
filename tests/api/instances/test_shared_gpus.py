"""Shared GPUs: holders, free shares and instance types."""

from collections.abc import Iterator
from typing import Any

import pytest

from mooring.core.gpu import MigDevice
from tests.api.conftest import Sandbox
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import make_key


@pytest.fixture
def sharing(client: Client, node: WireNode) -> Iterator[Client]:
    """A member of a project that may share GPUs; the node has eight GPUs."""
    project = client.post("/v1/projects", json={"name": "sharing"}).json()["id"]
    client.patch(f"/v1/projects/{project}", json={"gpu_sharing": True})
    key = make_key(client, project_id=project, role="member")["key"]
    with Client(str(client.base_url), key=key) as made:
        yield made


def _shared(member: Client, share: float) -> dict[str, Any]:
    return member.wait(member.create(gpus={"share": share})["id"], "scheduled")


def test_a_shared_gpu_shows_its_holders_and_free_share(client: Client, sharing: Client) -> None:
    one, other = _shared(sharing, 0.5), _shared(sharing, 0.3)
    assert one["devices"][0]["uuid"] == other["devices"][0]["uuid"]
    assert one["granted"]["isolation"] == "shared"
    assert [device["share"] for device in (*one["devices"], *other["devices"])] == [0.5, 0.3]
    path = f"/v1/gpus/{one['devices'][0]['uuid']}"
    for caller in (client, sharing):
        shown = caller.get(path).json()
        assert (shown["share_free"], shown["instance_id"]) == (0.2, None)
        assert shown["holders"] == [
            {"instance_id": one["id"], "share": 0.5, "mig_uuid": None},
            {"instance_id": other["id"], "share": 0.3, "mig_uuid": None},
        ]
        problem(caller.get(f"{path}/metrics"), 503, "no_sample")  # permitted, but the node has sent no sample


def test_the_only_holder_of_a_gpu_is_its_instance(client: Client, sharing: Client) -> None:
    only = _shared(sharing, 0.5)
    assert client.get(f"/v1/gpus/{only['devices'][0]['uuid']}").json()["instance_id"] == only["id"]


def test_other_projects_do_not_see_the_holders(client: Client, sharing: Client) -> None:
    one = _shared(sharing, 0.5)
    project = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    with Client(
        str(client.base_url), key=make_key(client, project_id=project, role="viewer")["key"]
    ) as other_project:
        seen_by_other = other_project.get(f"/v1/gpus/{one['devices'][0]['uuid']}")
        assert (seen_by_other.json()["holders"], seen_by_other.json()["instance_id"]) == ([], None)
        assert one["id"] not in seen_by_other.text
        # Only the holder's project may use the rest of the GPU.
        assert {kind["max_share_now"] for kind in other_project.items("/v1/instance-types")} == {1.0, None}


def test_instance_types_show_the_largest_share_that_could_start(
    client: Client, sharing: Client, node: WireNode
) -> None:
    for _ in range(8):
        client.wait(sharing.create(gpus={"share": 0.6})["id"], "scheduled")
    kinds = {kind["gpu_count"]: kind for kind in sharing.items("/v1/instance-types")}
    assert (kinds[1]["available"], kinds[1]["max_share_now"]) == (0, 0.4)
    assert kinds[1]["mig_profile"] is None


def test_mig_devices_are_listed_and_allocated(client: Client, node: WireNode) -> None:
    devices = [MigDevice(uuid=f"MIG-{number}", profile="1g.10gb", memory_mib=9728) for number in range(2)]
    node.gpus[0] = node.gpus[0].model_copy(update={"mig_mode": "enabled", "mig_devices": devices})
    node.sync()
    kinds = {kind["mig_profile"]: kind for kind in client.items("/v1/instance-types")}
    assert kinds["1g.10gb"]["name"] == "h100-80gb-hbm3-1g.10gb"
    assert (kinds["1g.10gb"]["total"], kinds["1g.10gb"]["available"]) == (2, 2)
    assert (kinds["1g.10gb"]["gpu_memory_mib"], kinds["1g.10gb"]["max_share_now"]) == (10_240, None)
    # A GPU with MIG devices is not allocated as a whole.
    assert max(kind["total"] for kind in client.items("/v1/instance-types") if kind["gpu_count"] == 1) == 7
    made = client.wait(client.create(gpus={"mig_profile": "1g.10gb"})["id"], "scheduled")
    assert made["granted"]["isolation"] == "mig"
    (device,) = made["devices"]
    shown = client.get(f"/v1/gpus/{device['uuid']}").json()
    assert {each["uuid"]: (each["free"], each["instance_id"]) for each in shown["mig_devices"]} == {
        "MIG-0": (False, made["id"]),
        "MIG-1": (True, None),
    }
    assert shown["holders"] == [{"instance_id": made["id"], "share": 0.142, "mig_uuid": "MIG-0"}]
    kinds = {kind["mig_profile"]: kind for kind in client.items("/v1/instance-types")}
    assert kinds["1g.10gb"]["available"] == 1


def test_a_whole_gpu_has_one_holder_and_no_free_share(sandbox: Sandbox) -> None:
    assignment = sandbox.placed(gpus={"count": 1})
    shown = sandbox.client.get(f"/v1/gpus/{assignment.gpu_uuids[0]}").json()
    assert (shown["share_free"], shown["instance_id"]) == (0.0, assignment.instance_id)
    assert [holder["share"] for holder in shown["holders"]] == [1.0]
