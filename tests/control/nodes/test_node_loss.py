"""Instances with `on_node_loss: replace` continue elsewhere, and no GPU of the lost node is given away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooring.loops.fencing import Fencing
from mooring.loops.node_health import NodeHealth
from mooring.schemas.agent import Assignment
from tests.nodes import WireNode, observed
from tests.service import Client, RunningService
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

UNREACHABLE_AFTER_S, LOST_AFTER_S = 30.0, 300.0
SELF_FENCED = {"code": "self_fenced", "message": "no contact"}


class Fleet:
    """Nodes with one GPU each, and the loop that watches them by a clock that the test moves."""

    def __init__(self, service: RunningService, client: Client) -> None:
        self.client, self.database = client, service.plane.database
        self.nodes: dict[str, WireNode] = {}
        self.now = 1000.0
        self.watch(None)

    def watch(self, fencing: Fencing | None) -> None:
        self.loop = NodeHealth(
            self.database, UNREACHABLE_AFTER_S, LOST_AFTER_S, fencing, clock=lambda: self.now
        )

    def join(self, *names: str, fences_itself: bool = True) -> None:
        for name in names:
            node = self.nodes[name] = WireNode(self.client, name, gpus=1)
            node.facts = node.facts.model_copy(update={"fences_itself": fences_itself})
            node.sync()

    def run(self, **fields: Any) -> tuple[dict[str, Any], Assignment, WireNode]:
        """Create an instance, and let its node run it."""
        made = self.client.create(gpus={"count": 1}, **fields)
        placed = self.client.wait(made["id"], "scheduled")
        node = self.nodes[placed["node_name"]]
        assignment = next(each for each in node.sync().assignments if each.instance_id == made["id"])
        node.sync(observed(assignment, "running"))
        return self.client.wait(made["id"], "running"), assignment, node

    def pass_time(self, seconds: int, *silent: WireNode) -> None:
        """A tick every ten seconds, at first and at the end every two; all other nodes report before each."""
        began, end = self.now, self.now + seconds
        while self.now < end:
            self.now += 10 if self.now > began and end - self.now > 20 else 2
            for node in self.nodes.values():
                if node not in silent:
                    node.sync(instances=None)
            self.loop.tick()

    def holder(self, node: WireNode) -> str | None:
        """The instance that has the node's GPU."""
        (gpu,) = self.client.items("/v1/gpus", node_id=node.id)
        return gpu["instance_id"]  # type: ignore[no-any-return]

    def events(self, kind: str) -> list[dict[str, Any]]:
        listed = self.client.items("/v1/events", limit=200)
        return [each["data"] for each in listed if each["type"] == kind]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


@pytest.fixture
def fleet(service: RunningService, client: Client) -> Iterator[Fleet]:
    made = Fleet(service, client)
    yield made
    made.close()


def test_an_instance_continues_on_another_node(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, first, lost = fleet.run(on_node_loss="replace")
    fleet.pass_time(290, lost)
    waiting = fleet.client.instance(running["id"])
    assert (waiting["state"], waiting["attempt"]) == ("unreachable", 1)

    fleet.pass_time(20, lost)
    placed = fleet.client.wait(running["id"], "scheduled")
    assert placed["attempt"] == 2
    assert placed["node_name"] != lost.name
    assert len(placed["devices"]) == 1
    assert fleet.holder(lost) == running["id"]
    (event,) = fleet.events("node.lost")
    assert event == {
        "node_id": lost.id, "node_name": lost.name, "instances": [running["id"]], "fenced": False,
    }  # fmt: skip
    other = fleet.nodes[placed["node_name"]]
    (second,) = other.sync().assignments
    other.sync(observed(second, "running"))
    fleet.client.wait(running["id"], "running")

    # The node returns with the old attempt: it must remove it, and its GPU is free only when it has.
    answer = lost.sync(observed(first, "running"))
    assert [(each.instance_id, each.attempt) for each in answer.removals] == [(running["id"], 1)]
    assert answer.assignments == []
    assert fleet.holder(lost) == running["id"]
    assert lost.sync(observed(first, "exited", exit_code=143)).removals
    assert fleet.holder(lost) == running["id"]
    lost.sync()
    assert fleet.holder(lost) is None
    assert fleet.client.instance(running["id"])["attempt"] == 2
    assert fleet.holder(other) == running["id"]


def test_gpus_of_a_lost_node_are_no_usage_and_are_given_to_nobody(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, first, lost = fleet.run(on_node_loss="replace")
    project = f"/v1/projects/{running['project_id']}"
    fleet.client.patch(project, json={"quotas": {"gpus_by_model": {"H100": 3}}})
    fleet.pass_time(310, lost)
    fleet.client.wait(running["id"], "scheduled")
    usage = fleet.client.get(project).json()["usage"]
    assert (usage["gpus"], usage["gpus_by_model"]) == (1, {"H100": 1})
    # When the node is back, and before its container is gone, its GPU is not free.
    lost.sync(observed(first, "running"))
    for _ in range(2):
        fleet.client.create(gpus={"count": 1})
    wait_until(lambda: len(fleet.client.items("/v1/instances", state="scheduled")) == 2)
    assert len(fleet.client.items("/v1/instances", state="pending")) == 1
    assert fleet.holder(lost) == running["id"]
    lost.sync()
    wait_until(lambda: not fleet.client.items("/v1/instances", state="pending"))


def test_an_instance_stays_on_its_node_unless_it_may_be_replaced(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, assignment, lost = fleet.run()
    fleet.pass_time(400, lost)
    assert fleet.client.instance(running["id"])["state"] == "unreachable"
    lost.sync(observed(assignment, "running"))
    assert fleet.client.instance(running["id"])["state"] == "running"


def test_a_stopped_instance_is_not_replaced(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, _assignment, lost = fleet.run(on_node_loss="replace")
    fleet.pass_time(40, lost)
    fleet.client.post(f"/v1/instances/{running['id']}/stop")
    fleet.pass_time(300, lost)
    assert fleet.client.instance(running["id"])["state"] == "unreachable"
    lost.sync()
    assert fleet.client.instance(running["id"])["state"] == "stopped"


def test_an_agent_that_does_not_fence_itself_keeps_its_instances(fleet: Fleet) -> None:
    fleet.join("a", "b", "c", fences_itself=False)
    running, _assignment, lost = fleet.run(on_node_loss="replace")
    fleet.pass_time(400, lost)
    assert fleet.client.instance(running["id"])["state"] == "unreachable"


def test_nothing_is_replaced_when_half_of_the_nodes_go_silent_at_once(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, assignment, lost = fleet.run(on_node_loss="replace")
    also = next(node for node in fleet.nodes.values() if node is not lost)
    fleet.pass_time(100, lost)
    fleet.pass_time(400, lost, also)
    assert fleet.client.instance(running["id"])["state"] == "unreachable"
    assert fleet.events("nodes.replacement_paused") == [{"silent": 2, "nodes": 3}]
    assert fleet.events("node.lost") == []

    fleet.pass_time(10, lost)
    assert fleet.events("nodes.replacement_resumed") == [{"silent": 1, "nodes": 3}]
    # The node has been silent for longer than the limit, and now it alone.
    fleet.pass_time(4, lost)
    assert fleet.client.wait(running["id"], "scheduled")["attempt"] == 2
    lost.sync(observed(assignment, "running"))
    assert len(fleet.events("nodes.replacement_paused")) == 1


def test_a_node_that_stopped_an_instance_without_contact_gives_it_back(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, assignment, node = fleet.run(on_node_loss="replace")
    fleet.pass_time(260, node)
    node.sync(observed(assignment, "exited", exit_code=143, reason=SELF_FENCED))
    placed = fleet.client.wait(running["id"], "scheduled")
    assert placed["attempt"] == 2
    states = [each["to"] for each in fleet.events("instance.state_changed")]
    assert states[-3:] == ["failed", "pending", "scheduled"]


def test_a_deleted_node_gives_its_gpus_back(fleet: Fleet) -> None:
    fleet.join("a", "b", "c")
    running, _assignment, lost = fleet.run(on_node_loss="replace")
    fleet.pass_time(310, lost)
    fleet.client.wait(running["id"], "scheduled")
    assert fleet.client.delete(f"/v1/nodes/{lost.id}").status_code in {202, 204}
    assert fleet.client.wait(running["id"], "scheduled")["attempt"] == 2
    instance = fleet.client.instance(running["id"])
    assert instance["state"] == "scheduled"


@pytest.mark.parametrize("status", [0, 1])
def test_a_node_is_replaced_only_if_the_fence_command_succeeds(
    fleet: Fleet, tmp_path: Path, status: int
) -> None:
    command, called = tmp_path / "fence", tmp_path / "called"
    command.write_text(
        f'#!/bin/sh\necho "$1 $2 $MOORING_NODE_ID $MOORING_NODE_NAME $MOORING_NODE_ADDRESS" >> {called}\n'
        f"echo broken; exit {status}\n"
    )
    command.chmod(0o755)
    fleet.watch(Fencing(f"{command} --off", 10))
    fleet.join("a", "b", "c", fences_itself=False)
    running, _assignment, lost = fleet.run(on_node_loss="replace")
    fleet.pass_time(296, lost)
    assert not called.exists()
    fleet.pass_time(10, lost)
    wait_until(lambda: called.exists() and called.read_text().endswith("\n"))
    assert called.read_text() == f"--off {lost.name} {lost.id} {lost.name} 127.0.0.1\n"
    if status:
        fleet.pass_time(10, lost)
        assert fleet.client.instance(running["id"])["state"] == "unreachable"
        return

    def is_replaced() -> bool:
        fleet.pass_time(2, lost)
        return bool(fleet.events("node.lost"))

    wait_until(is_replaced)
    assert fleet.client.wait(running["id"], "scheduled")["attempt"] == 2
    assert fleet.holder(lost) is None  # the command has said that nothing runs there
    assert fleet.events("node.lost")[0]["fenced"] is True


def test_a_command_that_hangs_has_failed(fleet: Fleet) -> None:
    fencing = Fencing("sleep 60", 0.1)
    fleet.watch(fencing)
    fleet.join("a", "b", "c")
    running, _assignment, lost = fleet.run(on_node_loss="replace")
    fleet.pass_time(320, lost)
    wait_until(lambda: all(each.ended_at is not None for each in fencing._attempts.values()))
    fleet.pass_time(4, lost)
    assert fleet.client.instance(running["id"])["state"] == "unreachable"
