"""Nodes that admins reserve for projects, and labels that they require of a project's nodes, over HTTP."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from mooring.control.instances import placements
from mooring.scheduler.model import Placement
from tests.api.conftest import Sandbox
from tests.api.tenants.test_secrets import Tenant
from tests.nodes import observed
from tests.problems import problem
from tests.service import Client


@pytest.fixture
def owner(shared: Client) -> Iterator[Tenant]:
    """The project that the sandbox's node is reserved for."""
    with Tenant(shared, f"own-{uuid4().hex[:8]}") as made:
        yield made


@pytest.fixture
def stranger(shared: Client) -> Iterator[Tenant]:
    with Tenant(shared, f"stranger-{uuid4().hex[:8]}") as made:
        yield made


def reserve(sandbox: Sandbox, *projects: str) -> dict[str, Any]:
    body = {"reserved_for": list(projects) or None}
    answer = sandbox.client.patch(f"/v1/nodes/{sandbox.node.id}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wish(sandbox: Sandbox, tenant: Tenant, **fields: Any) -> dict[str, Any]:
    """An instance of this tenant that names the sandbox's label."""
    made = tenant.member.create(**{"node_selector": {"sandbox": sandbox.node.name}, **fields})
    sandbox.made.append(made["id"])
    return made


def codes(client: Client, instance: dict[str, Any], node_id: str) -> set[str]:
    told = client.get(f"/v1/instances/{instance['id']}/explain").json()
    return {refusal["code"] for refusal in told["refusals"] if refusal["node_id"] == node_id}


def require(shared: Client, tenant: Tenant, **selector: str) -> None:
    answer = shared.patch(f"/v1/projects/{tenant.id}", json={"node_selector": selector})
    assert answer.status_code == 200, answer.text
    assert answer.json()["node_selector"] == selector


# --- reserved nodes


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_node_is_for_its_projects_alone(
    sandbox: Sandbox, owner: Tenant, stranger: Tenant, gpus: int
) -> None:
    """Without it, a stranger who names the label of somebody's node is placed beside them (finding 6)."""
    reserve(sandbox, owner.id)
    kept_out = wish(sandbox, stranger, gpus={"count": gpus})
    let_in = wish(sandbox, owner, gpus={"count": gpus})
    owner.member.wait(let_in["id"], "scheduled")
    assert stranger.member.instance(kept_out["id"])["state"] == "pending"
    told = stranger.member.get(f"/v1/instances/{kept_out['id']}/explain")
    assert codes(stranger.member, kept_out, sandbox.node.id) == {"node_reserved"}
    assert owner.id not in told.text
    reserve(sandbox)
    stranger.member.wait(kept_out["id"], "scheduled")


def test_dry_runs_and_immediate_placements_are_kept_out(
    sandbox: Sandbox, owner: Tenant, stranger: Tenant
) -> None:
    reserve(sandbox, owner.id)
    body = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": sandbox.node.name}}
    outcome = stranger.member.post("/v1/instances", params={"dry_run": "true"}, json=body).json()
    assert outcome["placeable"] is False
    assert outcome["would_fit"]["max_count_now"] == 0
    refused = stranger.member.post("/v1/instances", json={**body, "on_capacity": "fail"})
    problem(refused, 409, "insufficient_capacity")
    mine = owner.member.post("/v1/instances", params={"dry_run": "true"}, json=body).json()
    assert mine["node_id"] == sandbox.node.id


def test_a_group_is_kept_out_and_let_in(sandbox: Sandbox, owner: Tenant, stranger: Tenant) -> None:
    reserve(sandbox, owner.id)
    template = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": sandbox.node.name}}
    made = {}
    for tenant in (stranger, owner):
        answer = tenant.member.post("/v1/instance-groups", json={"count": 2, "template": template})
        assert answer.status_code == 201, answer.text
        made[tenant.id] = answer.json()["members"]
        sandbox.made += [member["instance_id"] for member in made[tenant.id]]
    for member in made[owner.id]:
        owner.member.wait(member["instance_id"], "scheduled")
    for member in made[stranger.id]:
        assert stranger.member.instance(member["instance_id"])["state"] == "pending"
    for tenant in (stranger, owner):
        for group in tenant.member.items("/v1/instance-groups"):
            tenant.member.delete(f"/v1/instance-groups/{group['id']}")


@pytest.mark.parametrize("rule", ["reserved_for", "node_selector"])
def test_a_plan_from_before_the_change_is_refused_at_the_write(
    sandbox: Sandbox, shared: Client, owner: Tenant, stranger: Tenant, rule: str
) -> None:
    """The scheduler may have planned with the rules of a moment ago; the guard reads the locked rows."""
    reserve(sandbox, owner.id)
    pending = wish(sandbox, stranger, gpus={"count": 1})
    if rule == "node_selector":
        require(shared, stranger, sandbox="nowhere")
        reserve(sandbox)
    plan = Placement(pending["id"], sandbox.node.id, (), 1000, 1024)
    database = sandbox.service.plane.database
    with database.write() as session:
        assert placements.assign(session, [plan]) == []
    mine = wish(sandbox, owner, node_selector={"sandbox": "nowhere"})
    with database.write() as session:
        plan = Placement(mine["id"], sandbox.node.id, (), 1000, 1024)
        assert placements.assign(session, [plan]) == [mine["id"]]


def test_what_runs_there_stays_and_does_not_come_back(
    sandbox: Sandbox, owner: Tenant, stranger: Tenant
) -> None:
    made = wish(sandbox, stranger)
    stranger.member.wait(made["id"], "scheduled")
    sandbox.sync(observed(sandbox.assignment(made["id"]), "running"))
    reserve(sandbox, owner.id)
    assert stranger.member.instance(made["id"])["state"] == "running"
    path = f"/v1/instances/{made['id']}"
    problem(stranger.member.post(f"{path}/restart"), 409, "node_not_allowed")
    assert stranger.member.post(f"{path}/stop").status_code == 202
    sandbox.sync(observed(sandbox.assignment(made["id"]), "exited", exit_code=0))
    stranger.member.wait(made["id"], "stopped")
    assert stranger.member.post(f"{path}/start").status_code == 202
    assert codes(stranger.member, made, sandbox.node.id) == {"node_reserved"}


def test_who_sees_for_whom_a_node_is_reserved(
    sandbox: Sandbox, shared: Client, owner: Tenant, stranger: Tenant
) -> None:
    both = sorted([owner.id, "prj_gone"])
    answer = shared.patch(f"/v1/nodes/{sandbox.node.id}", json={"reserved_for": both})
    problem(answer, 422, "unknown_project")
    reserve(sandbox, owner.id, owner.id)
    path = f"/v1/nodes/{sandbox.node.id}"
    assert shared.get(path).json()["reserved_for"] == [owner.id]
    assert owner.viewer.get(path).json()["reserved_for"] == [owner.id]
    assert stranger.viewer.get(path).json()["reserved_for"] == []
    problem(owner.owner.patch(path, json={"reserved_for": None}), 403, "forbidden")
    (entry, *_) = shared.items("/v1/audit-log", action="node.update")
    assert (entry["before"]["reserved_for"], entry["after"]["reserved_for"]) == (None, [owner.id])
    reserve(sandbox)
    assert stranger.viewer.get(path).json()["reserved_for"] is None


def test_a_stale_change_of_a_node_is_refused(sandbox: Sandbox, owner: Tenant) -> None:
    path = f"/v1/nodes/{sandbox.node.id}"
    read = sandbox.client.get(path)
    assert read.headers["etag"] == f'"{read.json()["version"]}"'
    assert sandbox.client.post(f"{path}/cordon").status_code == 200
    body = {"reserved_for": [owner.id]}
    stale = sandbox.client.patch(path, json=body, headers={"If-Match": read.headers["etag"]})
    problem(stale, 412, "precondition_failed")
    fresh = sandbox.client.get(path).headers["etag"]
    assert sandbox.client.patch(path, json=body, headers={"If-Match": fresh}).status_code == 200
    sandbox.client.post(f"{path}/uncordon")


@pytest.mark.parametrize("body", [{"reserved_for": []}, {"reserved_for": "prj"}, {"labels": {}}, []])
def test_what_cannot_be_changed_of_a_node_is_refused(sandbox: Sandbox, body: Any) -> None:
    problem(sandbox.client.patch(f"/v1/nodes/{sandbox.node.id}", json=body), 422, "validation_failed")


def test_instance_types_count_what_the_caller_may_use(
    sandbox: Sandbox, shared: Client, owner: Tenant, stranger: Tenant
) -> None:
    def available(client: Client) -> int:
        found = client.items("/v1/instance-types")
        return sum(each["available"] for each in found if each["gpu_count"] == 8)

    everything = available(shared)
    assert available(stranger.viewer) == everything
    reserve(sandbox, owner.id)
    assert available(shared) == available(owner.viewer) == everything
    assert available(stranger.viewer) == everything - 1
    require(shared, owner, sandbox="nowhere")
    assert available(owner.viewer) == 0
    require(shared, owner)


def test_gpus_of_others_nodes_are_not_reserved(
    sandbox: Sandbox, shared: Client, owner: Tenant, stranger: Tenant
) -> None:
    def devices(tenant: Tenant) -> set[str]:
        body = {"name": "r", "project_id": tenant.id, "gpus": {"count": 8}, "to": "2999-01-01T00:00:00Z"}
        answer = shared.post("/v1/reservations", json=body)
        if answer.status_code != 201:
            problem(answer, 409, "insufficient_capacity")
            return set()
        made = answer.json()
        shared.delete(f"/v1/reservations/{made['id']}")
        return {device["node_id"] for device in made["devices"]}

    reserve(sandbox, owner.id)
    require(shared, owner, sandbox=sandbox.node.name)
    assert devices(owner) == {sandbox.node.id}
    assert sandbox.node.id not in devices(stranger)


# --- the project's selector


def test_the_selector_of_a_project_goes_with_every_request(
    sandbox: Sandbox, shared: Client, owner: Tenant
) -> None:
    require(shared, owner, sandbox="nowhere")
    waits = owner.member.create(gpus={"count": 1})
    sandbox.made.append(waits["id"])
    told = owner.member.get(f"/v1/instances/{waits['id']}/explain").json()
    (refusal,) = (each for each in told["refusals"] if each["node_id"] == sandbox.node.id)
    assert (refusal["code"], refusal["wanted"]) == (
        "selector_mismatch",
        "sandbox=nowhere (required by the project)",
    )
    # A change reaches what waits already.
    require(shared, owner, sandbox=sandbox.node.name)
    placed = owner.member.wait(waits["id"], "scheduled")
    assert placed["node_id"] == sandbox.node.id
    assert placed["node_selector"] == {}  # the request is shown as it was made


def test_a_request_for_other_nodes_than_the_projects_is_refused(
    sandbox: Sandbox, shared: Client, owner: Tenant
) -> None:
    require(shared, owner, sandbox=sandbox.node.name)
    body = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": "other"}}
    group = {"count": 2, "template": body}
    for answer in (
        owner.member.post("/v1/instances", json=body),
        owner.member.post("/v1/instances", params={"dry_run": "true"}, json=body),
        owner.member.post("/v1/instance-groups", json=group),
    ):
        document = problem(answer, 403, "node_selector_conflict")
        assert (document["key"], document["required"]) == ("sandbox", sandbox.node.name)
    wish(sandbox, owner)  # the same value is no conflict


def test_only_admins_set_a_projects_nodes_and_local_images(shared: Client, owner: Tenant) -> None:
    path = f"/v1/projects/{owner.id}"
    for change in ({"node_selector": {"zone": "a"}}, {"local_images": True}):
        problem(owner.owner.patch(path, json=change), 403, "forbidden")
    shown = owner.viewer.get(path).json()
    assert (shown["node_selector"], shown["local_images"]) == ({}, False)
    default = next(each for each in shared.items("/v1/projects") if each["name"] == "default")
    assert default["local_images"] is True
    (entry, *_) = shared.items("/v1/audit-log", action="project.create")
    assert entry["target_id"] == owner.id


def test_a_node_hears_whether_a_project_may_run_local_images(
    sandbox: Sandbox, shared: Client, owner: Tenant
) -> None:
    made = wish(sandbox, owner)
    owner.member.wait(made["id"], "scheduled")
    assert sandbox.assignment(made["id"]).local_images is False
    assert shared.patch(f"/v1/projects/{owner.id}", json={"local_images": True}).status_code == 200
    assert sandbox.assignment(made["id"]).local_images is True
    assert sandbox.placed().local_images is True  # of the default project
