"""Parts of GPUs: shares and MIG devices."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from mooring.control import revisions
from mooring.core.gpu import GpuFacts, MigDevice
from mooring.db.tables import Allocation
from mooring.db.types import now
from tests.api.conftest import Sandbox
from tests.api.instances.test_quotas import LimitedProject
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

SMALL: dict[str, Any] = {"cpus": 1, "memory_mib": 64}


@pytest.fixture
def sharers(sandbox: Sandbox) -> Callable[..., LimitedProject]:
    """Creates projects that may share GPUs; seven of the sandbox's eight GPUs are in use."""
    sandbox.placed(gpus={"count": 7}, **SMALL)

    def made(name: str, **limits: Any) -> LimitedProject:
        project = LimitedProject(sandbox, name, **limits)
        answer = sandbox.client.patch(f"/v1/projects/{project.id}", json={"gpu_sharing": True})
        assert answer.status_code == 200, answer.text
        return project

    return made


def _share(project: LimitedProject, share: float) -> str:
    answer = project.post_instance(gpus={"share": share}, **SMALL)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _devices(client: Client, instance_id: str) -> list[tuple[str, float]]:
    shown = client.wait(instance_id, "scheduled")
    return [(device["uuid"], device["share"]) for device in shown["devices"]]


def test_only_instances_of_one_project_share_a_gpu(
    sandbox: Sandbox, sharers: Callable[..., LimitedProject]
) -> None:
    one, other = sharers("one"), sharers("other")
    half, quarter = _share(one, 0.5), _share(one, 0.25)
    ((uuid, share),) = _devices(sandbox.client, half)
    assert share == 0.5
    assert _devices(sandbox.client, quarter) == [(uuid, 0.25)]
    assert sandbox.client.instance(half)["granted"]["isolation"] == "shared"
    # It does not fit beside either part alone: their deletes may take effect one after the other.
    other_instance, too_large = _share(other, 0.25), _share(one, 0.9)
    wait_until(lambda: other.reason(other_instance)["code"] == "waiting_for_capacity")
    wait_until(lambda: one.reason(too_large)["code"] == "waiting_for_capacity")
    (refusal,) = sandbox.client.get(f"/v1/instances/{other_instance}/explain").json()["refusals"]
    assert refusal["code"] == "gpu_shared_by_other_project"
    # Another project can use the GPU immediately after its release.
    for instance_id in (half, quarter):
        sandbox.client.delete(f"/v1/instances/{instance_id}")
    sandbox.sync(instances=None)
    sandbox.sync()
    assert _devices(sandbox.client, other_instance) == [(uuid, 0.25)]
    assert one.reason(too_large)["code"] == "waiting_for_capacity"


def test_a_restart_keeps_the_share(sandbox: Sandbox, sharers: Callable[..., LimitedProject]) -> None:
    project = sharers("one")
    one, two = _share(project, 0.6), _share(project, 0.4)
    before = _devices(sandbox.client, one)
    sandbox.client.wait(two, "scheduled")
    sandbox.sync(observed(sandbox.assignment(one), "running"), observed(sandbox.assignment(two), "running"))
    assert sandbox.client.post(f"/v1/instances/{one}/restart").status_code == 202
    assert _devices(sandbox.client, one) == before
    assert sandbox.assignment(one).grants[0].milli == 600


def test_shares_count_as_fractions_towards_quotas(
    sandbox: Sandbox, sharers: Callable[..., LimitedProject]
) -> None:
    project = sharers("limited", gpus=1)
    _devices(sandbox.client, _share(project, 0.75))
    assert project.usage["gpus"] == 0.75
    project.require_rejected("gpus", 1, 0.75, 0.5, gpus={"share": 0.5})
    _devices(sandbox.client, _share(project, 0.25))
    assert project.usage["gpus"] == 1


def test_sharing_is_rejected_unless_the_project_may_share(sandbox: Sandbox) -> None:
    project = LimitedProject(sandbox, "alone")
    problem(project.post_instance(gpus={"share": 0.5}), 403, "gpu_sharing_not_allowed")
    problem(
        project.post_instance("/v1/instances?dry_run=true", gpus={"share": 0.5}),
        403,
        "gpu_sharing_not_allowed",
    )


def test_mig_devices_are_allocated_by_profile_and_their_gpu_is_not(sandbox: Sandbox) -> None:
    uuid = f"GPU-{sandbox.node.name}-mig"
    devices = [
        MigDevice(uuid=f"MIG-{sandbox.node.name}-{number}", profile="1g.10gb", memory_mib=9728)
        for number in range(2)
    ]
    mig_gpu = GpuFacts(
        uuid=uuid, index=8, model="NVIDIA H100 80GB HBM3", memory_mib=81_559, mig_mode="enabled",
        mig_devices=devices,
    )  # fmt: skip
    sandbox.node.gpus = [*sandbox.node.gpus, mig_gpu]
    sandbox.sync(gpus=sandbox.node.gpus)
    sandbox.client.post(f"/v1/nodes/{sandbox.node.id}/approve")
    sandbox.sync(gpus=sandbox.node.gpus)
    mig_uuids = set()
    for _ in devices:
        made = sandbox.create(gpus={"mig_profile": "1g.10gb"}, **SMALL)
        (device,) = sandbox.client.wait(made["id"], "scheduled")["devices"]
        assert device["uuid"] == uuid
        mig_uuids.add(device["mig_uuid"])
    assert mig_uuids == {device.uuid for device in devices}
    third = sandbox.create(gpus={"mig_profile": "1g.10gb"}, **SMALL)
    wait_until(lambda: sandbox.client.instance(third["id"])["reason"]["code"] == "waiting_for_capacity")
    (refusal,) = sandbox.client.get(f"/v1/instances/{third['id']}/explain").json()["refusals"]
    assert refusal["code"] == "insufficient_mig_devices"
    # Only the eight GPUs without MIG devices can be allocated whole: there is no ninth.
    sandbox.placed(gpus={"count": 8}, **SMALL)
    whole = sandbox.create(gpus={"count": 1}, **SMALL)
    wait_until(lambda: sandbox.client.instance(whole["id"])["reason"]["code"] == "waiting_for_capacity")


@pytest.fixture
def two_instances(client: Client, node: WireNode) -> list[dict[str, Any]]:
    """Two instances without GPUs; the tests write their allocations directly."""
    return [client.create(**SMALL) for _ in range(2)]


def _allocation(row: dict[str, Any], gpu: str, milli: int, **more: Any) -> Allocation:
    return Allocation(
        gpu_uuid=gpu, instance_id=row["id"], project_id=more.pop("project_id", row["project_id"]), attempt=1,
        milli=milli, from_at=now(), **more,
    )  # fmt: skip


@pytest.mark.both_databases
def test_the_database_rejects_shares_that_exceed_a_gpu(
    service: RunningService, two_instances: list[dict[str, Any]], node: WireNode
) -> None:
    """The second of two concurrent transactions does not see the first until it commits."""
    gpu_uuid = node.gpus[0].uuid
    began, rejected = threading.Event(), threading.Event()

    def second() -> None:
        began.wait(10)
        try:
            with service.plane.database.write() as session:
                session.add(_allocation(two_instances[1], gpu_uuid, 600))
        except IntegrityError:
            rejected.set()

    other = threading.Thread(target=second)
    other.start()
    with service.plane.database.write() as session:
        session.add(_allocation(two_instances[0], gpu_uuid, 600))
        session.flush()
        began.set()
    other.join(20)
    assert rejected.is_set()
    with service.plane.database.write() as session:
        session.add(_allocation(two_instances[1], gpu_uuid, 400))
        revisions.changed_many(session, [node.id])


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"milli": 500}, {"milli": 500, "project_id": "other"}),  # two projects on one GPU
        ({"milli": 142, "mig_uuid": "MIG-1"}, {"milli": 142, "mig_uuid": "MIG-1"}),
        ({"milli": 142, "mig_uuid": "MIG-1"}, {"milli": 500}),  # a GPU and its MIG device
        ({"milli": 500}, {"milli": 142, "mig_uuid": "MIG-1"}),
    ],
)
def test_the_database_rejects_forbidden_sharing(
    service: RunningService,
    client: Client,
    two_instances: list[dict[str, Any]],
    node: WireNode,
    first: dict[str, Any],
    second: dict[str, Any],
) -> None:
    if "project_id" in second:
        second = {**second, "project_id": client.post("/v1/projects", json={"name": "other"}).json()["id"]}
    with service.plane.database.write() as session:
        session.add(_allocation(two_instances[0], node.gpus[0].uuid, **first))
        revisions.changed_many(session, [node.id])
    with pytest.raises(IntegrityError), service.plane.database.write() as session:
        session.add(_allocation(two_instances[1], node.gpus[0].uuid, **second))
