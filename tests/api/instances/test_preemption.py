"""Preemption, requeueing and backfill over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring.schemas.agent import Assignment, ObservedInstance
from tests.nodes import WireNode, observed, simulated_node
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

SMALL: dict[str, Any] = {"cpus": 1, "memory_mib": 64}
LOW = {"gpus": {"count": 8}, "preemptible": True, "priority": 10, "preemption_grace_s": 5, **SMALL}


@pytest.fixture
def service(database_url: str, tmp_path: Path) -> Iterator[RunningService]:
    """A service that may preempt instances immediately after their start."""
    with running(settings_for(database_url, tmp_path / "data", preemption_min_run_s=0)) as made:
        yield made


class RunningInstances:
    """The running instances of the node."""

    def __init__(self, client: Client, node: WireNode) -> None:
        self._client = client
        self._node = node
        self._running: dict[str, Assignment] = {}

    def create(self, **fields: Any) -> str:
        """The ID of a new running instance."""
        made = self._client.create(**fields)
        self._client.wait(made["id"], "scheduled")
        reply = self._node.sync(instances=None)
        (assignment,) = (each for each in reply.assignments if each.instance_id == made["id"])
        self._running[assignment.instance_id] = assignment
        self._report()
        return assignment.instance_id

    def end(self, *instance_ids: str) -> None:
        """Report that these instances have exited, then that their containers are gone."""
        self._node.sync(instances=None)  # the node learns of a stop: an older report would not confirm it
        ended = [observed(self._running.pop(each), "exited", exit_code=0) for each in instance_ids]
        self._report(*ended)
        self._report()

    def _report(self, *more: ObservedInstance) -> None:
        self._node.sync(*(observed(each, "running") for each in self._running.values()), *more)


@pytest.fixture
def instances(client: Client, node: WireNode) -> RunningInstances:
    return RunningInstances(client, node)


def _reason_code(client: Client, instance_id: str) -> str:
    return str((client.instance(instance_id)["reason"] or {"code": ""})["code"])


def _project(client: Client, name: str, **fields: Any) -> str:
    made = client.post("/v1/projects", json={"name": name}).json()["id"]
    answer = client.patch(f"/v1/projects/{made}", json=fields)
    assert answer.status_code == 200, answer.text
    return str(made)


def test_a_preempted_instance_is_queued_and_runs_again(client: Client, tmp_path: Path) -> None:
    with simulated_node(client, tmp_path / "node", "gpu-1"):
        low = client.create(**LOW)
        client.wait(low["id"], "running")
        high = client.create(gpus={"count": 4}, priority=60, **SMALL)
        client.wait(high["id"], "running")
        again = client.wait(low["id"], "pending")
        assert again["desired_state"] == "running"
        client.delete(f"/v1/instances/{high['id']}")
        assert client.wait(low["id"], "running")["attempt"] == 2
    changes = client.items(f"/v1/instances/{low['id']}/events")
    transitions = [(event["data"]["to"], (event["data"]["reason"] or {}).get("code")) for event in changes]
    assert [state for state, code in transitions if code == "preempted"] == ["stopping", "stopped", "pending"]
    message = next(
        event["data"]["reason"]["message"] for event in changes if event["data"]["to"] == "stopping"
    )
    assert message == "preempted by an instance of priority 60"


def test_a_recently_placed_instance_is_not_preempted(database_url: str, tmp_path: Path) -> None:
    with (
        running(settings_for(database_url, tmp_path / "data")) as service,
        service.client as client,
        simulated_node(client, tmp_path / "node", "gpu-1"),
    ):
        low = client.create(**LOW)
        client.wait(low["id"], "running")
        high = client.create(gpus={"count": 1}, priority=60, **SMALL)
        wait_until(lambda: _reason_code(client, high["id"]) == "waiting_for_capacity")
        assert client.instance(low["id"])["state"] == "running"


def test_with_on_preemption_stop_a_preempted_instance_stops(client: Client, tmp_path: Path) -> None:
    with simulated_node(client, tmp_path / "node", "gpu-1"):
        low = client.create(**LOW, on_preemption="stop")
        client.wait(low["id"], "running")
        client.create(gpus={"count": 8}, priority=60, **SMALL)
        assert client.wait(low["id"], "stopped")["reason"]["code"] == "preempted"


@pytest.mark.parametrize("operation", ["stop", "delete"])
def test_a_stop_or_delete_during_preemption_prevents_requeueing(
    client: Client, instances: RunningInstances, operation: str
) -> None:
    low = instances.create(**LOW)
    client.create(gpus={"count": 8}, priority=60, **SMALL)
    client.wait(low, "stopping")
    path = f"/v1/instances/{low}"
    answer = client.post(f"{path}/stop") if operation == "stop" else client.delete(path)
    assert answer.status_code == 202
    instances.end(low)
    if operation == "stop":
        assert client.instance(low)["state"] == "stopped"
    else:
        assert client.get(path).status_code == 404


def test_equal_priority_and_non_preemptible_instances_are_not_preempted(
    client: Client, instances: RunningInstances
) -> None:
    stay = [
        instances.create(gpus={"count": 4}, preemptible=True, priority=60, **SMALL),
        instances.create(gpus={"count": 4}, priority=10, **SMALL),
    ]
    high = client.create(gpus={"count": 8}, priority=60, **SMALL)
    wait_until(lambda: _reason_code(client, high["id"]) == "waiting_for_capacity")
    assert [client.instance(instance_id)["state"] for instance_id in stay] == ["running", "running"]


def test_a_project_reclaims_only_its_guaranteed_gpus(client: Client, instances: RunningInstances) -> None:
    owner = _project(client, "owner", guaranteed_gpus=4)
    borrower = _project(client, "borrower", guaranteed_gpus=2)
    of_borrower = [instances.create(gpus={"count": 2}, project_id=borrower, **SMALL) for _ in range(4)]
    borrowed = [client.instance(instance_id)["granted"]["borrowed"] for instance_id in of_borrower]
    assert borrowed == [False, True, True, True]
    of_owner = client.create(gpus={"count": 4}, project_id=owner, **SMALL)

    def stopping() -> list[str]:
        return [each for each in of_borrower if client.instance(each)["state"] == "stopping"]

    wait_until(lambda: len(stopping()) == 2)
    for instance_id in stopping():
        assert client.instance(instance_id)["reason"] == {
            "code": "preempted",
            "message": "preempted by a project that needs its guaranteed GPUs",
        }
    instances.end(*stopping())
    client.wait(of_owner["id"], "scheduled")
    beyond = client.create(gpus={"count": 2}, project_id=owner, **SMALL)
    wait_until(lambda: _reason_code(client, beyond["id"]).startswith("waiting_for"))
    assert stopping() == []


def test_a_higher_priority_is_placed_first(client: Client, instances: RunningInstances) -> None:
    busy = instances.create(gpus={"count": 8}, **SMALL)
    early = client.create(gpus={"count": 8}, priority=10, **SMALL)
    late = client.create(gpus={"count": 8}, priority=90, **SMALL)
    wait_until(lambda: client.instance(late["id"])["queue_position"] == 1)
    wait_until(lambda: client.instance(early["id"])["queue_position"] == 2)
    instances.end(busy)
    client.wait(late["id"], "scheduled")
    assert client.instance(early["id"])["state"] == "pending"


def test_a_later_instance_is_backfilled_only_if_it_ends_before_the_first_starts(
    client: Client, instances: RunningInstances
) -> None:
    instances.create(gpus={"count": 4}, max_duration_s=3600, **SMALL)
    head = client.create(gpus={"count": 8}, **SMALL)
    wait_until(lambda: _reason_code(client, head["id"]) == "waiting_for_capacity")
    endless = client.create(gpus={"count": 1}, **SMALL)
    too_long = client.create(gpus={"count": 1}, max_duration_s=7200, **SMALL)
    short = client.create(gpus={"count": 1}, max_duration_s=600, **SMALL)
    client.wait(short["id"], "scheduled")
    wait_until(lambda: _reason_code(client, endless["id"]) == "waiting_for_turn")
    wait_until(lambda: _reason_code(client, too_long["id"]) == "waiting_for_turn")
    explained = client.get(f"/v1/instances/{head['id']}/explain").json()
    assert explained["queue_position"] == 1
