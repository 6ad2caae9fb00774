"""Instance groups: placement as a whole, networks and lifecycle."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mooring.control.instances import gangs
from mooring.core.node import SwarmFacts
from mooring.scheduler.model import Gang
from mooring.schemas.agent import Assignment, GroupMembership, SyncAnswer
from tests.nodes import WireNode, observed
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

GROUPS = "/v1/instance-groups"
_UNPLACEABLE = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": "nowhere"}}
_number = count(1)


class NodePair:
    """Two nodes with eight H100 each in one swarm, for this test's groups; the first node is the manager."""

    def __init__(self, client: Client, *, swarm: bool = True) -> None:
        self.client = client
        self.name = f"pair-{next(_number)}"
        self.nodes = [WireNode(client, f"{self.name}-{letter}") for letter in "ab"]
        for node in self.nodes:
            facts: dict[str, Any] = {"labels": {"sandbox": self.name}, "address": f"10.0.0.{next(_number)}"}
            if swarm:
                facts["swarm"] = SwarmFacts(cluster_id=self.name, manager=node is self.nodes[0])
            node.facts = node.facts.model_copy(update=facts)
            node.sync()
        self.made: list[str] = []
        self.answers: dict[str, SyncAnswer] = {}

    def group(self, **fields: Any) -> dict[str, Any]:
        """A new group of two that needs both nodes, unless `fields` change that."""
        template = {
            "image": "mooring-test/busybox:1",
            "gpus": {"count": 8},
            "node_selector": {"sandbox": self.name},
            **fields.pop("template", {}),
        }
        answer = self.client.post(GROUPS, json={"count": 2, "template": template, **fields})
        assert answer.status_code == 201, answer.text
        self.made.append(answer.json()["id"])
        return dict(answer.json())

    def placed(self, **fields: Any) -> dict[str, Any]:
        return self.wait_for(self.group(**fields)["id"], "starting")

    def running(self, **fields: Any) -> dict[str, Any]:
        made = self.placed(**fields)
        self.send_reports("running")
        return self.wait_for(made["id"], "running")

    def wait_for(self, group_id: str, state: str) -> dict[str, Any]:
        return wait_until(lambda: found if (found := self.get(group_id))["state"] == state else None)

    def get(self, group_id: str) -> dict[str, Any]:
        return dict(self.client.get(f"{GROUPS}/{group_id}").json())

    def assignments(self) -> list[Assignment]:
        """Both nodes' assignments, sorted by name, from answers to reports that do not list instances."""
        answers = [node.sync(instances=None) for node in self.nodes]
        return sorted((each for answer in answers for each in answer.assignments), key=lambda each: each.name)

    def send_reports(self, phase: str, *names: str, **fields: Any) -> None:
        """Both nodes report these members (default: all) in this phase, and the other members as running."""
        for node in self.nodes:
            assignments = node.sync(instances=None).assignments
            node.sync(
                *(
                    observed(each, phase, **fields)
                    if not names or each.name in names
                    else observed(each, "running")
                    for each in assignments
                )
            )

    def memberships(self) -> dict[str, GroupMembership]:
        return {each.name: each.group for each in self.assignments() if each.group}

    def close(self) -> None:
        for group_id in self.made:
            self.client.delete(f"{GROUPS}/{group_id}")
        for node in self.nodes:
            self.client.delete(f"/v1/nodes/{node.id}", params={"force": True})
            node.close()


@pytest.fixture
def node_pair(shared: Client) -> Iterator[NodePair]:
    made = NodePair(shared)
    yield made
    made.close()


def test_members_are_placed_together_and_know_one_another(node_pair: NodePair) -> None:
    made = node_pair.group(name="train", labels={"team": "vision"}, master_port=4000)
    assert (made["state"], made["count"], len(made["members"])) == ("pending", 2, 2)
    group = node_pair.wait_for(made["id"], "starting")
    assert {member["node_name"] for member in group["members"]} == {node.name for node in node_pair.nodes}
    assert [(each["rank"], each["name"]) for each in group["members"]] == [(0, "train-0"), (1, "train-1")]
    received = node_pair.memberships()
    assert received.keys() == {"train-0", "train-1"}
    for rank, membership in enumerate(received.values()):
        assert (membership.rank, membership.count, membership.hostname) == (rank, 2, f"train-{rank}")
        assert (
            membership.env.items()
            >= {
                "MASTER_ADDR": "train-0",
                "MASTER_PORT": "4000",
                "RANK": str(rank),
                "NODE_RANK": str(rank),
                "WORLD_SIZE": "2",
                "NNODES": "2",
                "NPROC_PER_NODE": "8",
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "8",
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "train-0",
                "PET_MASTER_PORT": "4000",
                "MOORING_GROUP_HOSTS": "train-0,train-1",
            }.items()
        )
        assert membership.hostfile == "train-0 slots=8\ntrain-1 slots=8\n"
    instance = node_pair.client.instance(group["members"][1]["instance_id"])
    assert (instance["group_id"], instance["group_rank"]) == (made["id"], 1)
    assert instance["labels"] == {"team": "vision"}


def test_variables_of_launchers_are_defaults(node_pair: NodePair) -> None:
    env = {"PET_NPROC_PER_NODE": "1", "NNODES": "1:2"}
    node_pair.placed(name="own", template={"env": env, "gpus": {"count": 0}})
    for membership in node_pair.memberships().values():
        assert not env.keys() & membership.env.keys()
        assert membership.env["NPROC_PER_NODE"] == "1"  # without GPUs
        assert membership.hostfile == "own-0 slots=1\nown-1 slots=1\n"


def test_members_on_a_swarm_use_an_overlay_that_the_manager_creates_and_removes(node_pair: NodePair) -> None:
    group = node_pair.placed(name="spans", network={"encrypted": True})
    assert group["network"] == {"mode": "auto", "encrypted": True, "used": "overlay"}
    name = f"mooring-{group['id']}"
    assert {(each.network, each.overlay_name) for each in node_pair.memberships().values()} == {
        ("overlay", name)
    }
    manager, other = (node.sync(instances=None) for node in node_pair.nodes)
    (overlay,) = manager.overlays
    assert (overlay.name, overlay.group_id, overlay.encrypted) == (name, group["id"], True)
    assert overlay.project_id == group["project_id"]
    assert other.overlays == []
    node_pair.send_reports("running")
    node_pair.client.delete(f"{GROUPS}/{group['id']}")
    for node in node_pair.nodes:
        node.sync()
    assert wait_until(lambda: not node_pair.nodes[0].sync().overlays)


def test_members_on_one_node_use_a_bridge_network(node_pair: NodePair) -> None:
    group = node_pair.placed(template={"gpus": {"count": 2}})
    assert len({member["node_id"] for member in group["members"]}) == 1
    assert group["network"]["used"] == "bridge"
    assert {each.network for each in node_pair.memberships().values()} == {"bridge"}
    assert node_pair.nodes[0].sync(instances=None).overlays == []


def test_without_a_swarm_members_wait_unless_host_network_is_allowed(shared: Client) -> None:
    node_pair = NodePair(shared, swarm=False)
    (project,) = shared.items("/v1/projects", name="default")
    path = f"/v1/projects/{project['id']}"
    try:
        group = node_pair.group(name="apart")
        problem(
            shared.post(GROUPS, json={"count": 1, "template": {"image": "b"}, "network": {"mode": "host"}}),
            403,
            "host_network_not_allowed",
        )
        wait_until(lambda: node_pair.get(group["id"])["reason"]["code"] != "queued")
        assert node_pair.get(group["id"])["state"] == "pending"
        assert shared.patch(path, json={"host_network": True}).status_code == 200
        group = node_pair.wait_for(group["id"], "starting")
        assert group["network"]["used"] == "host"
        addresses = {node.id: node.facts.address for node in node_pair.nodes}
        address = addresses[group["members"][0]["node_id"]]
        assert {each.env["MASTER_ADDR"] for each in node_pair.memberships().values()} == {address}
        by_rank = [addresses[each["node_id"]] for each in group["members"]]
        hostfiles = {each.hostfile for each in node_pair.memberships().values()}
        assert hostfiles == {"".join(f"{each} slots=8\n" for each in by_rank)}
    finally:
        shared.patch(path, json={"host_network": False})
        node_pair.close()


def test_no_member_is_placed_unless_all_are(node_pair: NodePair) -> None:
    group = node_pair.group(count=3)
    wait_until(lambda: (node_pair.get(group["id"])["reason"] or {}).get("code") != "queued")
    assert {member["state"] for member in node_pair.get(group["id"])["members"]} == {"pending"}
    assert node_pair.assignments() == []
    assert node_pair.get(group["id"])["queue_position"] >= 1


def test_a_group_succeeds_when_all_members_have_succeeded(node_pair: NodePair) -> None:
    group = node_pair.running(name="ends")
    node_pair.send_reports("exited", "ends-1", exit_code=0)
    assert node_pair.get(group["id"])["state"] == "running"
    node_pair.send_reports("exited", exit_code=0)
    assert node_pair.wait_for(group["id"], "succeeded")["actions"] == ["start", "delete"]


def test_a_failed_member_fails_the_group(node_pair: NodePair) -> None:
    group = node_pair.running(name="falls")
    node_pair.send_reports("exited", "falls-1", exit_code=3)
    stopping = node_pair.wait_for(group["id"], "stopping")
    assert stopping["reason"]["code"] == "member_failed"
    assert "member 1 (falls-1)" in stopping["reason"]["message"]
    assert stopping["members"][0]["reason"]["code"] == "member_failed"
    node_pair.send_reports("exited", exit_code=143)
    failed = node_pair.wait_for(group["id"], "failed")
    assert [member["state"] for member in failed["members"]] == ["stopped", "failed"]
    # The whole group can be started again.
    started = node_pair.client.post(f"{GROUPS}/{group['id']}/start")
    assert started.status_code == 202, started.text
    again = node_pair.wait_for(group["id"], "starting")
    assert (again["reason"], {member["attempt"] for member in again["members"]}) == (None, {2})


def test_a_failed_member_is_restarted_with_restart_member(node_pair: NodePair) -> None:
    group = node_pair.running(name="mends", on_member_failure="restart_member")
    node_pair.send_reports("exited", "mends-1", exit_code=3)
    again = wait_until(
        lambda: found if (found := node_pair.get(group["id"]))["members"][1]["attempt"] == 2 else None
    )
    assert (again["restarts"], again["members"][0]["state"]) == (1, "running")
    node_pair.send_reports("running")
    assert (
        node_pair.wait_for(group["id"], "running")["members"][1]["node_id"] == group["members"][1]["node_id"]
    )
    # The restarted member could run on either node, so the network still spans both.
    assert again["network"]["used"] == "overlay"


def _stopping_with_reason(node_pair: NodePair, group_id: str) -> dict[str, Any] | None:
    found = node_pair.get(group_id)
    return found if found["state"] == "stopping" and found["reason"] else None


def test_a_member_that_fails_too_often_fails_the_group(node_pair: NodePair) -> None:
    group = node_pair.running(
        name="tries", on_member_failure="restart_member", template={"gpus": {"count": 1}}
    )
    for restarts in range(1, 11):
        node_pair.send_reports("exited", "tries-0", exit_code=1)
        wait_until(partial(_has_restarted, node_pair, group["id"], restarts), timeout_s=20)
        wait_until(partial(_is_placed_again, node_pair, group["id"]), timeout_s=20)
        node_pair.send_reports("running")
    node_pair.send_reports("exited", "tries-0", exit_code=1)
    ended = wait_until(partial(_stopping_with_reason, node_pair, group["id"]))
    assert (ended["restarts"], ended["reason"]["code"]) == (10, "member_failed")


def _is_placed_again(node_pair: NodePair, group_id: str) -> bool:
    return bool(node_pair.get(group_id)["members"][0]["state"] == "scheduled")


def _has_restarted(node_pair: NodePair, group_id: str, times: int) -> bool:
    return bool(node_pair.get(group_id)["restarts"] == times)


def test_a_limit_that_stops_one_member_stops_all(node_pair: NodePair) -> None:
    group = node_pair.running(name="limited", template={"max_duration_s": 1})
    ended = wait_until(
        lambda: found if (found := node_pair.get(group["id"]))["state"] != "running" else None, timeout_s=10
    )
    assert ended["state"] in {"stopping", "stopped"}
    wait_until(lambda: node_pair.get(group["id"])["desired_state"] == "stopped")
    assert node_pair.get(group["id"])["reason"]["code"] == "max_duration_reached"


def test_a_group_is_stopped_and_deleted_as_a_whole(node_pair: NodePair) -> None:
    group = node_pair.running()
    path = f"{GROUPS}/{group['id']}"
    stopped = node_pair.client.post(f"{path}/stop", json={"timeout_s": 3})
    assert (stopped.status_code, stopped.json()["state"]) == (202, "stopping")
    assert {each.stop_timeout_s for each in node_pair.assignments()} == {3}
    assert node_pair.client.post(f"{path}/stop").status_code == 202
    problem(node_pair.client.post(f"{path}/start"), 409, "invalid_transition")
    for node in node_pair.nodes:
        node.sync()
    assert node_pair.wait_for(group["id"], "stopped")["reason"]["code"] == "stopped_by_user"
    problem(node_pair.client.post(f"{path}/stop"), 409, "invalid_transition")
    assert node_pair.client.delete(path).status_code == 202
    problem(node_pair.client.get(path), 404, "not_found")
    problem(node_pair.client.delete(path), 404, "not_found")


def test_a_group_is_not_placed_again_until_all_members_have_ended(
    node_pair: NodePair, shared_service: RunningService
) -> None:
    group = node_pair.running()
    node_pair.client.post(f"{GROUPS}/{group['id']}/stop")

    def gang() -> Gang | None:
        with shared_service.plane.database.read() as session:
            return gangs.of(session, [group["id"]]).get(group["id"])

    for node in node_pair.nodes:
        assert gang() is None
        node.sync()
    assert gang() == Gang(group["id"], 2, "overlay")


def test_a_deleted_running_group_is_gone_after_its_nodes_report_it(node_pair: NodePair) -> None:
    group = node_pair.running(name="goes")
    path = f"{GROUPS}/{group['id']}"
    stale = node_pair.client.delete(path, headers={"If-Match": '"1"'})
    problem(stale, 412, "precondition_failed")
    tag = node_pair.client.get(path).headers["ETag"]
    deleted = node_pair.client.delete(path, headers={"If-Match": tag})
    assert (deleted.status_code, deleted.json()["state"]) == (202, "stopping")
    node_pair.nodes[0].sync()
    assert node_pair.client.get(path).status_code == 200
    node_pair.nodes[1].sync()
    wait_until(lambda: node_pair.client.get(path).status_code == 404)
    # The name can be used again.
    wait_until(
        lambda: (
            node_pair.client.post(
                GROUPS, json={"name": "goes", "count": 1, "template": _UNPLACEABLE}
            ).status_code
            == 201
        )
    )


def test_most_operations_on_a_single_member_are_rejected(node_pair: NodePair) -> None:
    group = node_pair.running()
    member = f"/v1/instances/{group['members'][0]['instance_id']}"
    for answer in (
        node_pair.client.post(f"{member}/stop"),
        node_pair.client.post(f"{member}/start"),
        node_pair.client.post(f"{member}/restart"),
        node_pair.client.delete(member),
        node_pair.client.patch(member, json={"name": "other"}),
    ):
        assert problem(answer, 409, "member_of_group")["group_id"] == group["id"]
    assert node_pair.client.patch(member, json={"labels": {"a": "b"}}).status_code == 200
    assert node_pair.get(group["id"])["state"] == "running"


def test_a_single_member_may_be_restarted_with_restart_member(node_pair: NodePair) -> None:
    group = node_pair.running(on_member_failure="restart_member")
    member = group["members"][1]["instance_id"]
    assert node_pair.client.post(f"/v1/instances/{member}/restart").status_code == 202
    assert node_pair.get(group["id"])["members"][1]["attempt"] == 2
    problem(node_pair.client.post(f"/v1/instances/{member}/stop"), 409, "member_of_group")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"template": {"image": "b", "env": {"MASTER_ADDR": "x"}}}, "reserved_env"),
        ({"template": {"image": "b", "env": {"MOORING_X": "x"}}}, "reserved_env"),
        ({"template": {"image": "b", "on_node_loss": "replace"}}, "not_supported_yet"),
        ({"template": {"image": "b", "name": "x"}}, "validation_failed"),
        ({"template": {"image": "b", "project_id": "x"}}, "validation_failed"),
        ({"template": {"image": "b"}, "labels": {"mooring.x": "y"}}, "reserved_label"),
        ({"template": {"image": "b"}, "count": 0}, "validation_failed"),
        ({"template": {"image": "b"}, "count": 65}, "validation_failed"),
        ({"template": {"image": "b"}, "name": "x" * 61}, "validation_failed"),
    ],
)
def test_an_invalid_group_is_rejected(shared: Client, fields: dict[str, Any], code: str) -> None:
    problem(shared.post(GROUPS, json={"count": 2, **fields}), 422, code)


def test_a_group_with_on_capacity_fail_is_placed_at_once_or_rejected(node_pair: NodePair) -> None:
    template = {"image": "b", "gpus": {"count": 8}, "on_capacity": "fail"}
    answer = node_pair.client.post(GROUPS, json={"count": 3, "name": "large", "template": template})
    refused = problem(answer, 409, "insufficient_capacity")
    assert refused["detail"].startswith("the 3 members do not fit all at once now")
    assert refused["would_fit"]["max_count_now"] == 8
    assert {each["code"] for each in refused["refusals"]} <= {"gang", "insufficient_gpus"}
    # Nothing of it is left: neither the group, nor a member, nor its names.
    assert node_pair.client.items(GROUPS, name="large") == []
    assert node_pair.client.items("/v1/instances", name="large-0") == []

    placed = node_pair.client.post(GROUPS, json={"count": 2, "name": "large", "template": template})
    assert placed.status_code == 201, placed.text
    assert [each["state"] for each in placed.json()["members"]] == ["scheduled", "scheduled"]
    problem(
        node_pair.client.post(GROUPS, json={"count": 2, "template": {**template, "gpus": {"count": 1}}}),
        409,
        "insufficient_capacity",
    )


def test_names_of_groups_and_members_are_unique(shared: Client) -> None:
    def post(name: str) -> Any:
        return shared.post(GROUPS, json={"name": name, "count": 2, "template": _UNPLACEABLE})

    assert post("twice").status_code == 201
    assert problem(post("twice"), 409, "name_taken")["name"] == "twice"
    shared.create(name="single-1", **_UNPLACEABLE)
    assert problem(post("single"), 409, "name_taken")["name"] == "single-1"
    assert shared.items(GROUPS, name="single") == []
    generated = shared.post(GROUPS, json={"count": 1, "template": _UNPLACEABLE}).json()
    assert generated["name"].startswith("busybox-")
    assert [each["name"] for each in generated["members"]] == [f"{generated['name']}-0"]


def test_a_quota_admits_all_members_or_none(shared: Client) -> None:
    project = shared.post("/v1/projects", json={"name": f"few-{next(_number)}"}).json()["id"]
    shared.patch(f"/v1/projects/{project}", json={"quotas": {"gpus": 3}})
    template = {**_UNPLACEABLE, "gpus": {"count": 1}}
    body = {"count": 4, "project_id": project, "template": template}
    rejected = problem(shared.post(GROUPS, json=body), 403, "quota_exceeded")
    assert (rejected["limit"], rejected["used"], rejected["asked"]) == (3, 0, 4)
    assert shared.items("/v1/instances", project_id=project) == []
    made = shared.post(GROUPS, json={**body, "count": 3})
    assert made.status_code == 201
    path = f"{GROUPS}/{made.json()['id']}"
    assert shared.post(f"{path}/stop").json()["state"] == "stopped"
    shared.create(project_id=project, gpus={"count": 1}, node_selector={"sandbox": "nowhere"})
    problem(shared.post(f"{path}/start"), 403, "quota_exceeded")
    assert shared.get(path).json()["state"] == "stopped"


def test_a_repeated_request_creates_no_second_group(shared: Client) -> None:
    headers = {"Idempotency-Key": f"group-{next(_number)}"}
    body = {"count": 2, "template": _UNPLACEABLE}
    first, again = (shared.post(GROUPS, json=body, headers=headers) for _ in range(2))
    assert first.content == again.content
    assert first.headers["Location"] == f"{GROUPS}/{first.json()['id']}"
    assert len(shared.items("/v1/instances", name=first.json()["members"][0]["name"])) == 1


def test_groups_are_filtered_by_project_name_and_label(shared: Client) -> None:
    made = shared.post(
        GROUPS,
        json={"name": f"found-{next(_number)}", "count": 1, "labels": {"a": "1"}, "template": _UNPLACEABLE},
    ).json()
    for params in ({"name": made["name"]}, {"project_id": made["project_id"]}, {"label": "a:1"}):
        assert made["id"] in {each["id"] for each in shared.items(GROUPS, **params)}
    assert shared.items(GROUPS, label="a:2") == []
    member = shared.instance(made["members"][0]["instance_id"])
    assert (member["group_id"], member["group_rank"]) == (made["id"], 0)


def test_the_creation_and_the_stop_of_a_group_are_events(shared: Client) -> None:
    made = shared.post(GROUPS, json={"count": 1, "template": _UNPLACEABLE}).json()
    shared.post(f"{GROUPS}/{made['id']}/stop")
    after, received = 0, []
    while page := shared.items("/v1/events", after=after, limit=200):
        received += [each for each in page if each["data"].get("group_id") == made["id"]]
        after = page[-1]["seq"]
    assert [each["type"] for each in received] == ["instance_group.changed"] * 2
    assert [each["data"]["desired_state"] for each in received] == ["running", "stopped"]


def test_a_group_is_preempted_and_placed_again_as_a_whole(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(database_url, tmp_path / "data", preemption_min_run_s=0.0)
    with running(settings) as service, service.client as admin:
        node_pair = NodePair(admin)
        group = node_pair.running(name="yields", template={"preemptible": True, "priority": 10})
        urgent = admin.create(
            name="urgent", priority=90, gpus={"count": 8}, node_selector={"sandbox": node_pair.name}
        )
        preempted = node_pair.wait_for(group["id"], "stopping")
        assert {member["reason"]["code"] for member in preempted["members"]} == {"preempted"}
        assert preempted["desired_state"] == "running"
        node_pair.send_reports("exited", exit_code=143)
        assert admin.wait(urgent["id"], "scheduled")["state"] == "scheduled"
        waiting = node_pair.wait_for(group["id"], "pending")
        assert {member["state"] for member in waiting["members"]} == {"pending"}
        admin.post(f"/v1/instances/{urgent['id']}/stop")
        for _ in range(2):  # the answer to the first report has the removal, the second report confirms it
            for node in node_pair.nodes:
                node.sync()
        again = node_pair.wait_for(group["id"], "starting")
        assert {member["attempt"] for member in again["members"]} == {2}
        node_pair.close()
