"""Planned evictions are validated again under locks, because the state may have changed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mooring.control.instances import preemption
from mooring.db.session import Database
from mooring.scheduler.model import Eviction
from tests.nodes import WireNode
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

SMALL: dict[str, Any] = {"cpus": 1, "memory_mib": 64}


@pytest.fixture
def database(service: RunningService) -> Database:
    return service.plane.database


@pytest.fixture
def waiting(client: Client, node: WireNode) -> str:
    """A pending instance of priority 60 that no preemption can place."""
    made = client.create(gpus={"count": 9}, priority=60, **SMALL)
    wait_until(lambda: client.instance(made["id"])["reason"]["code"] != "queued")
    return str(made["id"])


def _placed(client: Client, **fields: Any) -> str:
    made = client.create(**{"gpus": {"count": 1}, "preemptible": True, "priority": 10, **SMALL, **fields})
    client.wait(made["id"], "scheduled")
    return str(made["id"])


def _evicted(
    database: Database, *evictions: Eviction, min_run_s: float = 0, stopping: Sequence[str] = ()
) -> list[str]:
    with database.write() as session:
        return preemption.evict(session, evictions, min_run_s, stopping)


def test_a_valid_eviction_is_applied(
    client: Client, database: Database, node: WireNode, waiting: str
) -> None:
    victims = [_placed(client) for _ in range(2)]
    plan = [Eviction(victim, node.id, waiting, "priority") for victim in victims]
    assert _evicted(database, *plan) == victims
    assert {client.instance(victim)["state"] for victim in victims} == {"stopping"}
    assert _evicted(database, *plan, stopping=victims) == []  # they are stopping already


def test_two_replicas_do_not_both_preempt(
    client: Client, database: Database, node: WireNode, waiting: str
) -> None:
    first, second = (_placed(client) for _ in range(2))
    assert _evicted(database, Eviction(first, node.id, waiting, "priority")) == [first]
    other = Eviction(second, node.id, waiting, "priority")
    assert _evicted(database, other) == []  # planned without knowledge of the first eviction
    assert _evicted(database, other, stopping=[first]) == [second]


@pytest.mark.parametrize(
    ("victim", "eviction", "min_run_s"),
    [
        ({"preemptible": False}, {}, 0),
        ({"priority": 60}, {}, 0),  # not lower than that of the waiting instance
        ({}, {}, 300),  # it has not run for long enough
        ({}, {"node_id": "nod_other"}, 0),  # it is not on this node
        ({}, {"for_instance_id": "ins_none"}, 0),  # no such instance
        ({"preemptible": False}, {"because": "reclaim"}, 0),  # no project has a guarantee
    ],
)
def test_an_outdated_eviction_is_not_applied(
    client: Client,
    database: Database,
    node: WireNode,
    waiting: str,
    victim: dict[str, Any],
    eviction: dict[str, Any],
    min_run_s: float,
) -> None:
    placed = _placed(client, **victim)
    plan = replace(Eviction(placed, node.id, waiting, "priority"), **eviction)
    assert _evicted(database, plan, min_run_s=min_run_s) == []
    assert client.instance(placed)["state"] == "scheduled"


def test_all_victims_of_an_instance_are_stopped_or_none(
    client: Client, database: Database, node: WireNode, waiting: str
) -> None:
    plan = [
        Eviction(victim, node.id, waiting, "priority")
        for victim in (_placed(client), _placed(client, priority=70))
    ]
    assert _evicted(database, *plan) == []


def test_all_members_of_a_group_count_against_the_guarantee(
    client: Client, database: Database, node: WireNode
) -> None:
    """A project uses four GPUs and is guaranteed two: only one group of two can be reclaimed."""
    owner = client.post("/v1/projects", json={"name": "owner"}).json()["id"]
    client.patch(f"/v1/projects/{owner}", json={"guaranteed_gpus": 9})
    waits = client.create(gpus={"count": 9}, project_id=owner, **SMALL)["id"]
    body = {"count": 2, "template": {"image": "b", "gpus": {"count": 1}, **SMALL}}
    group = client.post("/v1/instance-groups", json=body).json()["id"]
    members = [each["instance_id"] for each in client.get(f"/v1/instance-groups/{group}").json()["members"]]
    for member in members:
        client.wait(member, "scheduled")
    alone = [_placed(client, preemptible=False) for _ in range(2)]
    borrower = client.instance(alone[0])["project_id"]
    client.patch(f"/v1/projects/{borrower}", json={"guaranteed_gpus": 2})
    of_group = Eviction(members[0], node.id, waits, "reclaim")
    assert _evicted(database, of_group, Eviction(alone[0], node.id, waits, "reclaim")) == []
    assert sorted(_evicted(database, of_group)) == sorted(members)


def test_nothing_is_preempted_for_an_instance_that_is_no_longer_pending(
    client: Client, database: Database, node: WireNode, waiting: str
) -> None:
    victim = _placed(client)
    client.post(f"/v1/instances/{waiting}/stop")
    assert _evicted(database, Eviction(victim, node.id, waiting, "priority")) == []
