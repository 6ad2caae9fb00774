"""Neither concurrent requests nor outdated placements allocate a GPU twice."""

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from mooring.control import revisions
from mooring.control.instances import placements
from mooring.core import ids
from mooring.db.tables import Allocation, Instance, Node, Reservation
from mooring.db.types import new_id, now
from mooring.scheduler.model import GpuAllocation, Placement
from tests.concurrency import run_concurrently
from tests.nodes import WireNode, observed
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

BODY = {"image": "mooring-test/busybox:1", "gpus": {"count": 1}, "cpus": 1, "memory_mib": 64}


def _holders(client: Client) -> list[str]:
    """The instance of each allocated GPU."""
    return [gpu["instance_id"] for gpu in client.items("/v1/gpus") if gpu["instance_id"]]


def test_8_of_64_concurrent_immediate_creates_get_the_8_gpus(client: Client, node: WireNode) -> None:
    answers = run_concurrently(
        64, lambda _n: client.post("/v1/instances", json=BODY | {"on_capacity": "fail"})
    )
    assert Counter(answer.status_code for answer in answers) == {201: 8, 409: 56}
    won = sorted(answer.json()["id"] for answer in answers if answer.status_code == 201)
    assert sorted(_holders(client)) == won
    assert {answer.json()["code"] for answer in answers if answer.status_code == 409} == {
        "insufficient_capacity"
    }
    assert len(client.items("/v1/instances", limit=200)) == 8
    assert sorted(item.instance_id for item in node.sync(instances=None).assignments) == won


def test_8_of_64_concurrent_creates_are_placed(client: Client, node: WireNode) -> None:
    made = run_concurrently(64, lambda _n: client.post("/v1/instances", json=BODY))
    assert {answer.status_code for answer in made} == {201}

    def settled() -> bool:
        listed = client.items("/v1/instances", limit=200)
        reasons = [(item["reason"] or {}).get("code") for item in listed]
        return len(listed) == 64 and "queued" not in reasons

    wait_until(settled, 30)
    states = Counter(item["state"] for item in client.items("/v1/instances", limit=200))
    assert states == {"scheduled": 8, "pending": 56}
    assert len(set(_holders(client))) == 8


def test_concurrent_operations_and_reports_leave_a_consistent_state(client: Client, node: WireNode) -> None:
    made = client.create(gpus={"count": 1})
    client.wait(made["id"], "scheduled")
    (assignment,) = node.sync().assignments
    running = observed(assignment, "running")
    node.sync(running)

    def act(number: int) -> int:
        if number == 0:
            return node.post_sync(running).status_code
        operation = ("stop", "restart", "start")[number % 3]
        return client.post(f"/v1/instances/{made['id']}/{operation}").status_code

    assert set(run_concurrently(13, act)) <= {200, 202, 409}
    events = client.items(f"/v1/instances/{made['id']}/events")
    versions = [event["data"]["version"] for event in events]
    assert versions == sorted(set(versions))
    for before, after in pairwise(events):
        assert after["data"]["from"] == before["data"]["to"]


@pytest.fixture
def pending(client: Client, node: WireNode) -> tuple[str, str]:
    """Two pending instances; the node is cordoned, so that only `_assign` places them."""
    client.post(f"/v1/nodes/{node.id}/cordon")
    one, two = (client.create(gpus={"count": 4}, cpus=1, memory_mib=64)["id"] for _ in range(2))
    for instance_id in (one, two):
        _wait_for_reason(client, instance_id)
    return one, two


def _wait_for_reason(client: Client, instance_id: str) -> None:
    """Wait until the scheduler has considered the pending instance."""
    wait_until(lambda: client.instance(instance_id)["reason"]["code"] != "queued")


def _assign(service: RunningService, node_id: str, *decided: Placement) -> list[str]:
    # The node is uncordoned only within the transaction: the scheduler always sees it cordoned.
    with service.plane.database.write() as session:
        node = session.get_one(Node, node_id)
        node.cordoned = False
        placed = placements.assign(session, decided)
        node.cordoned = True
    return placed


def _placement(instance_id: str, node: WireNode, *indexes: int, **more: Any) -> Placement:
    return Placement(
        **{
            "instance_id": instance_id, "node_id": node.id, "cpu_milli": 1000, "memory_mib": 64,
            "allocations": tuple(GpuAllocation(node.gpus[index].uuid) for index in indexes), **more,
        }
    )  # fmt: skip


def test_the_second_of_two_overlapping_placements_is_rejected(
    service: RunningService, client: Client, node: WireNode, pending: tuple[str, str]
) -> None:
    one, two = pending
    assert _assign(service, node.id, _placement(one, node, 0, 1, 2, 3)) == [one]
    assert _assign(service, node.id, _placement(two, node, 3, 4, 5, 6)) == []
    shown = client.instance(two)
    assert (shown["state"], shown["attempt"], shown["devices"]) == ("pending", 0, [])
    assert Counter(_holders(client)) == {one: 4}
    assert _assign(service, node.id, _placement(two, node, 4, 5, 6, 7)) == [two]


def test_only_the_first_of_overlapping_placements_of_one_cycle_is_written(
    service: RunningService, client: Client, node: WireNode, pending: tuple[str, str]
) -> None:
    one, two = pending
    overlapping = (
        _placement(one, node, 0, 1, 2, 3),
        _placement(two, node, 3, 4, 5, 6),
        _placement(one, node, 4, 5, 6, 7),
    )
    assert _assign(service, node.id, *overlapping) == [one]
    assert Counter(_holders(client)) == {one: 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"node_id": "nod_none"},
        {"cpu_milli": 64_001},
        {"memory_mib": 524_288},
        {"allocations": (GpuAllocation("GPU-unknown"),)},
        {"allocations": (GpuAllocation("GPU-gpu-1-0", 142, "MIG-unknown"),)},
        {"allocations": (GpuAllocation("GPU-gpu-1-0"), GpuAllocation("GPU-gpu-1-0", 1))},
        {"instance_id": "ins_none"},
    ],
)
def test_an_invalid_placement_is_rejected(
    service: RunningService, node: WireNode, pending: tuple[str, str], changes: dict[str, Any]
) -> None:
    invalid = replace(_placement(pending[0], node, 0), **changes)
    assert _assign(service, node.id, invalid) == []


def test_a_placement_on_an_unhealthy_gpu_or_cordoned_node_or_of_a_stopped_instance_is_rejected(
    service: RunningService, client: Client, node: WireNode, pending: tuple[str, str]
) -> None:
    one, two = pending
    incident = {"id": "i-1", "uuid": node.gpus[0].uuid, "code": "xid_79", "message": "fell off the bus"}
    node.sync(incidents=[incident])
    assert _assign(service, node.id, _placement(one, node, 0)) == []
    client.post(f"/v1/instances/{one}/stop")
    assert _assign(service, node.id, _placement(one, node, 1)) == []
    with service.plane.database.write() as session:  # here the node stays cordoned
        assert placements.assign(session, [_placement(two, node, 1)]) == []


def test_a_placement_on_a_gpu_reserved_meanwhile_is_rejected(
    service: RunningService, client: Client, node: WireNode, pending: tuple[str, str]
) -> None:
    """Only the reservation's project, and instances that end before the reservation, may use the GPU."""
    one, two = pending
    begins = now() + timedelta(hours=1)
    other_project = client.post("/v1/projects", json={"name": "others"}).json()["id"]
    own_project = client.instance(one)["project_id"]
    with service.plane.database.write() as session:
        for project_id, index in ((other_project, 0), (own_project, 1)):
            session.add(_reservation(project_id, node.gpus[index].uuid, begins))
        session.get_one(Instance, two).max_duration_s = 1800
        revisions.changed(session, node.id)
    assert _assign(service, node.id, _placement(one, node, 0)) == []
    assert _assign(service, node.id, _placement(two, node, 0), _placement(one, node, 1)) == [two, one]


def _reservation(project_id: str, uuid: str, begins: datetime) -> Reservation:
    return Reservation(
        id=new_id(ids.RESERVATION), project_id=project_id, name="course", asked={"count": 1},
        gpu_uuids=[uuid], from_at=begins, to_at=begins + timedelta(hours=1), version=1, created_at=now(),
    )  # fmt: skip


def test_cpus_are_not_allocated_twice(
    service: RunningService, node: WireNode, pending: tuple[str, str]
) -> None:
    one, two = pending
    both = _placement(one, node, cpu_milli=40_000), _placement(two, node, cpu_milli=40_000)
    assert _assign(service, node.id, *both) == [one]
    assert _assign(service, node.id, _placement(two, node, cpu_milli=24_001)) == []
    assert _assign(service, node.id, _placement(two, node, cpu_milli=24_000)) == [two]


def test_a_placement_that_shares_a_gpu_with_another_project_is_rejected(
    service: RunningService, client: Client, node: WireNode, pending: tuple[str, str]
) -> None:
    one, two = pending
    other = client.post("/v1/projects", json={"name": "other"}).json()["id"]
    other_projects_instance = client.create(gpus={"count": 4}, project_id=other, cpus=1, memory_mib=64)["id"]
    _wait_for_reason(client, other_projects_instance)
    half = (GpuAllocation(node.gpus[0].uuid, 500),)
    halves = [
        _placement(instance_id, node, allocations=half) for instance_id in (one, other_projects_instance, two)
    ]
    assert _assign(service, node.id, *halves) == [one, two]


def test_the_database_rejects_a_second_allocation_of_a_gpu(
    service: RunningService, client: Client, node: WireNode
) -> None:
    one = client.create(gpus={"count": 8})
    two = client.create(gpus={"count": 8})
    client.wait(one["id"], "scheduled")

    def insert(to_at: datetime | None) -> None:
        with service.plane.database.write() as session:
            session.add(
                Allocation(
                    gpu_uuid=node.gpus[0].uuid, instance_id=two["id"], project_id=two["project_id"],
                    attempt=1, milli=1000, from_at=now(), to_at=to_at,
                )
            )  # fmt: skip

    with pytest.raises(IntegrityError):
        insert(None)
    insert(now())  # an ended allocation is no conflict


def test_the_database_rejects_an_unknown_state(service: RunningService, client: Client) -> None:
    made = client.create()
    with pytest.raises(IntegrityError), service.plane.database.write() as session:
        session.execute(text("UPDATE instances SET state = 'limbo' WHERE id = :id"), {"id": made["id"]})
