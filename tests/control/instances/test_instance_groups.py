"""Instance groups in transitional states: deletion not yet recorded, members being stopped."""

from typing import Any

import pytest

from mooring.control.instances import gangs, instance_groups
from mooring.core.access import SYSTEM
from mooring.db.session import Database
from mooring.db.tables import Instance, InstanceGroup, Project
from mooring_client.schemas.instance_groups import InstanceGroupCreate
from mooring_client.schemas.states import State
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client, RunningService
from tests.tenancy.tenants import make_key

pytestmark = pytest.mark.both_databases

GROUPS = "/v1/instance-groups"
TEMPLATE: dict[str, Any] = {"image": "mooring-test/busybox:1"}


@pytest.fixture
def database(service: RunningService) -> Database:
    return service.plane.database


def _made(client: Client, **fields: Any) -> dict[str, Any]:
    answer = client.post(GROUPS, json={"count": 2, "template": TEMPLATE, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_the_name_of_a_group_is_free_as_soon_as_it_answers_404(client: Client, database: Database) -> None:
    group = _made(client, name="train", template={**TEMPLATE, "gpus": {"count": 1}})
    body = InstanceGroupCreate.model_validate({"name": "train", "count": 2, "template": TEMPLATE})
    with database.write() as session:
        instance_groups.delete(session, SYSTEM, group["id"], None)
        # As after a node's report: the last member is gone, and no loop has processed the group yet.
        session.get_one(InstanceGroup, group["id"]).deleted_at = None
        session.flush()
        again = instance_groups.create(session, SYSTEM, session.get_one(Project, group["project_id"]), body)
        assert again.name == "train"
    assert client.get(f"{GROUPS}/{again.id}").status_code == 200
    assert client.get(f"{GROUPS}/{group['id']}").status_code == 404


def test_a_group_waits_for_preempted_members_on_an_unreachable_node(
    client: Client, database: Database, node: WireNode
) -> None:
    group = _made(client, template={**TEMPLATE, "gpus": {"count": 9}})
    with database.write() as session:
        unreachable, pending = (session.get_one(Instance, each["instance_id"]) for each in group["members"])
        assert gangs.of(session, {group["id"]}).keys() == {group["id"]}
        unreachable.state, unreachable.requeue = State.UNREACHABLE, True
        session.flush()
        assert pending.state is State.PENDING
        assert gangs.of(session, {group["id"]}) == {}
        session.rollback()


def test_starting_a_group_again_checks_the_current_rules_of_its_project(client: Client) -> None:
    project = client.post("/v1/projects", json={"name": "modest"}).json()["id"]
    key = make_key(client, project_id=project, role="member")["key"]
    with Client(str(client.base_url), key=key) as member:
        group = _made(member, template={**TEMPLATE, "priority": 90, "gpus": {"count": 1}})
        assert member.post(f"{GROUPS}/{group['id']}/stop").status_code == 202
        client.patch(f"/v1/projects/{project}", json={"max_priority": 50})
        problem(member.post(f"{GROUPS}/{group['id']}/start"), 403, "priority_not_allowed")
        assert client.post(f"{GROUPS}/{group['id']}/start").status_code == 202
