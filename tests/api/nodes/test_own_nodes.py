"""Nodes that are reserved for projects, and node selectors of projects, over HTTP."""

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
def outsider(shared: Client) -> Iterator[Tenant]:
    with Tenant(shared, f"outsider-{uuid4().hex[:8]}") as made:
        yield made


def reserve(sandbox: Sandbox, *projects: str) -> dict[str, Any]:
    body = {"reserved_for": list(projects) or None}
    answer = sandbox.client.patch(f"/v1/nodes/{sandbox.node.id}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def create_on_node(sandbox: Sandbox, tenant: Tenant, **fields: Any) -> dict[str, Any]:
    """A new instance of the tenant with the sandbox's label as node selector."""
    made = tenant.member.create(**{"node_selector": {"sandbox": sandbox.node.name}, **fields})
    sandbox.created_ids.append(made["id"])
    return made


def refusal_codes(client: Client, instance: dict[str, Any], node_id: str) -> set[str]:
    explanation = client.get(f"/v1/instances/{instance['id']}/explain").json()
    return {refusal["code"] for refusal in explanation["refusals"] if refusal["node_id"] == node_id}


def set_project_selector(shared: Client, tenant: Tenant, **selector: str) -> None:
    answer = shared.patch(f"/v1/projects/{tenant.id}", json={"node_selector": selector})
    assert answer.status_code == 200, answer.text
    assert answer.json()["node_selector"] == selector


# --- reserved nodes


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_reserved_node_runs_only_instances_of_its_projects(
    sandbox: Sandbox, owner: Tenant, outsider: Tenant, gpus: int
) -> None:
    """Labels alone would not prevent it: any project can select a node by its labels."""
    reserve(sandbox, owner.id)
    waiting = create_on_node(sandbox, outsider, gpus={"count": gpus})
    placed_instance = create_on_node(sandbox, owner, gpus={"count": gpus})
    owner.member.wait(placed_instance["id"], "scheduled")
    assert outsider.member.instance(waiting["id"])["state"] == "pending"
    explanation = outsider.member.get(f"/v1/instances/{waiting['id']}/explain")
    assert refusal_codes(outsider.member, waiting, sandbox.node.id) == {"node_reserved"}
    assert owner.id not in explanation.text
    reserve(sandbox)
    outsider.member.wait(waiting["id"], "scheduled")


def test_a_reserved_node_is_not_used_by_other_dry_runs_and_immediate_placements(
    sandbox: Sandbox, owner: Tenant, outsider: Tenant
) -> None:
    reserve(sandbox, owner.id)
    body = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": sandbox.node.name}}
    outcome = outsider.member.post("/v1/instances", params={"dry_run": "true"}, json=body).json()
    assert outcome["placeable"] is False
    assert outcome["would_fit"]["max_count_now"] == 0
    rejected = outsider.member.post("/v1/instances", json={**body, "on_capacity": "fail"})
    problem(rejected, 409, "insufficient_capacity")
    outcome = owner.member.post("/v1/instances", params={"dry_run": "true"}, json=body).json()
    assert outcome["node_id"] == sandbox.node.id


def test_a_reserved_node_runs_only_groups_of_its_projects(
    sandbox: Sandbox, owner: Tenant, outsider: Tenant
) -> None:
    reserve(sandbox, owner.id)
    template = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": sandbox.node.name}}
    made = {}
    for tenant in (outsider, owner):
        answer = tenant.member.post("/v1/instance-groups", json={"count": 2, "template": template})
        assert answer.status_code == 201, answer.text
        made[tenant.id] = answer.json()["members"]
        sandbox.created_ids += [member["instance_id"] for member in made[tenant.id]]
    for member in made[owner.id]:
        owner.member.wait(member["instance_id"], "scheduled")
    for member in made[outsider.id]:
        assert outsider.member.instance(member["instance_id"])["state"] == "pending"
    for tenant in (outsider, owner):
        for group in tenant.member.items("/v1/instance-groups"):
            tenant.member.delete(f"/v1/instance-groups/{group['id']}")


@pytest.mark.parametrize("rule", ["reserved_for", "node_selector"])
def test_a_placement_from_before_the_change_is_not_written(
    sandbox: Sandbox, shared: Client, owner: Tenant, outsider: Tenant, rule: str
) -> None:
    """The scheduler may have used outdated rules; the guard reads the locked rows."""
    reserve(sandbox, owner.id)
    pending = create_on_node(sandbox, outsider, gpus={"count": 1})
    if rule == "node_selector":
        set_project_selector(shared, outsider, sandbox="nowhere")
        reserve(sandbox)
    placement = Placement(pending["id"], sandbox.node.id, (), 1000, 1024)
    database = sandbox.service.plane.database
    with database.write() as session:
        assert placements.assign(session, [placement]) == []
    own = create_on_node(sandbox, owner, node_selector={"sandbox": "nowhere"})
    with database.write() as session:
        placement = Placement(own["id"], sandbox.node.id, (), 1000, 1024)
        assert placements.assign(session, [placement]) == [own["id"]]


def test_running_instances_stay_on_a_newly_reserved_node_until_their_end(
    sandbox: Sandbox, owner: Tenant, outsider: Tenant
) -> None:
    made = create_on_node(sandbox, outsider)
    outsider.member.wait(made["id"], "scheduled")
    sandbox.sync(observed(sandbox.assignment(made["id"]), "running"))
    reserve(sandbox, owner.id)
    assert outsider.member.instance(made["id"])["state"] == "running"
    path = f"/v1/instances/{made['id']}"
    problem(outsider.member.post(f"{path}/restart"), 409, "node_not_allowed")
    assert outsider.member.post(f"{path}/stop").status_code == 202
    sandbox.sync(observed(sandbox.assignment(made["id"]), "exited", exit_code=0))
    outsider.member.wait(made["id"], "stopped")
    assert outsider.member.post(f"{path}/start").status_code == 202
    assert refusal_codes(outsider.member, made, sandbox.node.id) == {"node_reserved"}


def test_the_projects_of_a_reserved_node_are_visible_to_them_and_to_admins(
    sandbox: Sandbox, shared: Client, owner: Tenant, outsider: Tenant
) -> None:
    with_unknown = sorted([owner.id, "prj_unknown"])
    answer = shared.patch(f"/v1/nodes/{sandbox.node.id}", json={"reserved_for": with_unknown})
    problem(answer, 422, "unknown_project")
    reserve(sandbox, owner.id, owner.id)
    path = f"/v1/nodes/{sandbox.node.id}"
    assert shared.get(path).json()["reserved_for"] == [owner.id]
    assert owner.viewer.get(path).json()["reserved_for"] == [owner.id]
    assert outsider.viewer.get(path).json()["reserved_for"] == []
    problem(owner.owner.patch(path, json={"reserved_for": None}), 403, "forbidden")
    (entry, *_) = shared.items("/v1/audit-log", action="node.update")
    assert (entry["before"]["reserved_for"], entry["after"]["reserved_for"]) == (None, [owner.id])
    reserve(sandbox)
    assert outsider.viewer.get(path).json()["reserved_for"] is None


def test_a_change_of_a_node_with_a_stale_etag_is_rejected(sandbox: Sandbox, owner: Tenant) -> None:
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
def test_an_invalid_change_of_a_node_is_rejected(sandbox: Sandbox, body: Any) -> None:
    problem(sandbox.client.patch(f"/v1/nodes/{sandbox.node.id}", json=body), 422, "validation_failed")


def test_instance_types_count_the_nodes_that_the_caller_may_use(
    sandbox: Sandbox, shared: Client, owner: Tenant, outsider: Tenant
) -> None:
    def available(client: Client) -> int:
        found = client.items("/v1/instance-types")
        return sum(each["available"] for each in found if each["gpu_count"] == 8)

    total = available(shared)
    assert available(outsider.viewer) == total
    reserve(sandbox, owner.id)
    assert available(shared) == available(owner.viewer) == total
    assert available(outsider.viewer) == total - 1
    set_project_selector(shared, owner, sandbox="nowhere")
    assert available(owner.viewer) == 0
    set_project_selector(shared, owner)


def test_reservations_do_not_use_nodes_of_other_projects(
    sandbox: Sandbox, shared: Client, owner: Tenant, outsider: Tenant
) -> None:
    def reserved_nodes(tenant: Tenant) -> set[str]:
        """The nodes of the eight GPUs that a reservation gets; none if it is rejected."""
        body = {"name": "r", "project_id": tenant.id, "gpus": {"count": 8}, "to": "2999-01-01T00:00:00Z"}
        answer = shared.post("/v1/reservations", json=body)
        if answer.status_code != 201:
            problem(answer, 409, "insufficient_capacity")
            return set()
        made = answer.json()
        shared.delete(f"/v1/reservations/{made['id']}")
        return {device["node_id"] for device in made["devices"]}

    reserve(sandbox, owner.id)
    set_project_selector(shared, owner, sandbox=sandbox.node.name)
    assert reserved_nodes(owner) == {sandbox.node.id}
    assert sandbox.node.id not in reserved_nodes(outsider)


# --- the project's selector


def test_the_selector_of_a_project_applies_to_every_instance(
    sandbox: Sandbox, shared: Client, owner: Tenant
) -> None:
    set_project_selector(shared, owner, sandbox="nowhere")
    waiting = owner.member.create(gpus={"count": 1})
    sandbox.created_ids.append(waiting["id"])
    explanation = owner.member.get(f"/v1/instances/{waiting['id']}/explain").json()
    (refusal,) = (each for each in explanation["refusals"] if each["node_id"] == sandbox.node.id)
    assert (refusal["code"], refusal["wanted"]) == (
        "selector_mismatch",
        "sandbox=nowhere (required by the project)",
    )
    # A change applies to pending instances too.
    set_project_selector(shared, owner, sandbox=sandbox.node.name)
    placed = owner.member.wait(waiting["id"], "scheduled")
    assert placed["node_id"] == sandbox.node.id
    assert placed["node_selector"] == {}  # the request's own selector is unchanged


def test_a_request_that_conflicts_with_the_projects_selector_is_rejected(
    sandbox: Sandbox, shared: Client, owner: Tenant
) -> None:
    set_project_selector(shared, owner, sandbox=sandbox.node.name)
    body = {"image": "mooring-test/busybox:1", "node_selector": {"sandbox": "other"}}
    group = {"count": 2, "template": body}
    for answer in (
        owner.member.post("/v1/instances", json=body),
        owner.member.post("/v1/instances", params={"dry_run": "true"}, json=body),
        owner.member.post("/v1/instance-groups", json=group),
    ):
        document = problem(answer, 403, "node_selector_conflict")
        assert (document["key"], document["required"]) == ("sandbox", sandbox.node.name)
    create_on_node(sandbox, owner)  # the same value is no conflict


def test_only_admins_set_the_selector_and_local_images_of_a_project(shared: Client, owner: Tenant) -> None:
    path = f"/v1/projects/{owner.id}"
    for change in ({"node_selector": {"zone": "a"}}, {"local_images": True}):
        problem(owner.owner.patch(path, json=change), 403, "forbidden")
    shown = owner.viewer.get(path).json()
    assert (shown["node_selector"], shown["local_images"]) == ({}, False)
    default = next(each for each in shared.items("/v1/projects") if each["name"] == "default")
    assert default["local_images"] is True
    (entry, *_) = shared.items("/v1/audit-log", action="project.create")
    assert entry["target_id"] == owner.id


def test_assignments_say_whether_the_project_may_run_local_images(
    sandbox: Sandbox, shared: Client, owner: Tenant
) -> None:
    made = create_on_node(sandbox, owner)
    owner.member.wait(made["id"], "scheduled")
    assert sandbox.assignment(made["id"]).local_images is False
    assert shared.patch(f"/v1/projects/{owner.id}", json={"local_images": True}).status_code == 200
    assert sandbox.assignment(made["id"]).local_images is True
    assert sandbox.placed().local_images is True  # an instance of the default project
