"""Disk space of nodes, instances and projects, and the check when a placement is written."""

from typing import Any

import pytest
from sqlalchemy import update

from mooring.control.instances import placements
from mooring.core.disk import DiskFacts
from mooring.db.tables import Instance
from mooring.scheduler.model import Placement
from tests.api.conftest import Sandbox
from tests.nodes import observed
from tests.problems import problem

GIB = 1024  # in MiB


def disk_facts(**changes: Any) -> DiskFacts:
    return DiskFacts.model_validate(
        {
            "total_mib": 1000 * GIB,
            "allocatable_mib": 800 * GIB,
            "available_mib": 900 * GIB,
            "images_mib": 5 * GIB,
            "enforced": True,
            "driver": "overlay2",
            "filesystem": "xfs",
            **changes,
        }
    )


def report(sandbox: Sandbox, facts: DiskFacts | None) -> None:
    sandbox.node.facts = sandbox.node.facts.model_copy(update={"disk": facts})
    sandbox.sync(*sandbox.reported)


def dry_run(sandbox: Sandbox, **fields: Any) -> dict[str, Any]:
    body = {"image": "busybox", "node_selector": {"sandbox": sandbox.node.name}, **fields}
    answer = sandbox.client.post("/v1/instances", params={"dry_run": True}, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusals(sandbox: Sandbox, **fields: Any) -> list[tuple[str, str, str]]:
    """Why the sandbox's node cannot host such an instance: code, wanted and had."""
    found = dry_run(sandbox, **fields)["refusals"]
    of_node = [each for each in found if each["node_id"] == sandbox.node.id]
    return [(each["code"], each["wanted"], each["had"]) for each in of_node]


def project(sandbox: Sandbox, **changes: Any) -> str:
    made = sandbox.client.post("/v1/projects", json={"name": f"disk-of-{sandbox.node.name}"}).json()["id"]
    answer = sandbox.client.patch(f"/v1/projects/{made}", json=changes)
    assert answer.status_code == 200, answer.text
    return str(made)


def test_a_node_shows_its_disk(sandbox: Sandbox) -> None:
    shown = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert (shown["disk_mib"], shown["disk_enforced"], shown["storage"]) == (None, None, None)
    report(sandbox, disk_facts())
    sandbox.placed(disk_mib=100 * GIB)
    shown = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert (shown["disk_mib"], shown["disk_allocatable_mib"]) == (1000 * GIB, 800 * GIB)
    assert (shown["disk_mib_free"], shown["disk_enforced"]) == (700 * GIB, True)
    assert shown["storage"] == {
        "driver": "overlay2",
        "filesystem": "xfs",
        "available_mib": 900 * GIB,
        "images_mib": 5 * GIB,
        "pressure": False,
    }


def test_an_instance_gets_its_requested_disk_or_the_default(sandbox: Sandbox) -> None:
    report(sandbox, disk_facts())
    with_size, without = sandbox.placed(disk_mib=100 * GIB), sandbox.placed()
    assert (with_size.disk_mib, without.disk_mib) == (100 * GIB, 10 * GIB)
    shown = sandbox.client.instance(with_size.instance_id)
    assert (shown["disk_mib"], shown["granted"]["disk_mib"]) == (100 * GIB, 100 * GIB)
    shown = sandbox.client.instance(without.instance_id)
    assert (shown["disk_mib"], shown["granted"]["disk_mib"]) == (None, 10 * GIB)


def test_allocated_disk_is_unavailable_until_its_release(sandbox: Sandbox) -> None:
    report(sandbox, disk_facts())
    first = sandbox.running(disk_mib=700 * GIB)
    assert refusals(sandbox, disk_mib=101 * GIB) == [("insufficient_disk", "101 GiB", "100 GiB")]
    waiting = sandbox.create(disk_mib=101 * GIB)["id"]
    explained = sandbox.client.get(f"/v1/instances/{waiting}/explain").json()
    assert explained["state"] == "pending"
    assert "insufficient_disk" in {each["code"] for each in explained["refusals"]}
    sandbox.client.delete(f"/v1/instances/{first.instance_id}")
    sandbox.reported.clear()
    sandbox.sync()
    sandbox.client.wait(waiting, "scheduled")


@pytest.mark.parametrize("disk_mib", [63, 2**31, -1, 0.5, "64"])
def test_an_invalid_size_is_rejected(sandbox: Sandbox, disk_mib: Any) -> None:
    answer = sandbox.client.post("/v1/instances", json={"image": "busybox", "disk_mib": disk_mib})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/disk_mib"


def test_a_node_of_an_earlier_release_runs_instances_without_a_disk_request(sandbox: Sandbox) -> None:
    assert sandbox.placed().disk_mib == 10 * GIB
    ((code, _wanted, had),) = refusals(sandbox, disk_mib=GIB)
    assert (code, had) == ("insufficient_disk", "unknown: its agent does not report it")


def test_a_node_with_disk_pressure_gets_no_new_instances(sandbox: Sandbox) -> None:
    report(sandbox, disk_facts())
    running = sandbox.running()
    report(sandbox, disk_facts(pressure=True))
    assert [code for code, *_ in refusals(sandbox)] == ["disk_pressure"]
    shown = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
    assert (shown["state"], shown["storage"]["pressure"]) == ("ready", True)
    assert sandbox.client.instance(running.instance_id)["state"] == "running"
    report(sandbox, disk_facts())
    assert dry_run(sandbox)["placeable"]


class TestQuotas:
    def test_disk_counts_from_the_request(self, sandbox: Sandbox) -> None:
        report(sandbox, disk_facts())
        limited = project(sandbox, quotas={"disk_mib": 100 * GIB})
        sandbox.placed(project_id=limited, disk_mib=80 * GIB)
        sandbox.placed(project_id=limited)
        usage = sandbox.client.get(f"/v1/projects/{limited}").json()["usage"]
        assert usage["disk_mib"] == 90 * GIB
        body = {"image": "busybox", "project_id": limited, "disk_mib": 11 * GIB}
        found = problem(sandbox.client.post("/v1/instances", json=body), 403, "quota_exceeded")
        assert (found["quota"], found["limit"], found["used"]) == ("disk_mib", 100 * GIB, 90 * GIB)
        sandbox.placed(project_id=limited, disk_mib=10 * GIB)

    def test_a_group_counts_all_members(self, sandbox: Sandbox) -> None:
        limited = project(sandbox, quotas={"disk_mib": 100 * GIB})
        body = {
            "name": "g",
            "project_id": limited,
            "count": 3,
            "template": {"image": "x", "disk_mib": 40 * GIB},
        }
        found = problem(sandbox.client.post("/v1/instance-groups", json=body), 403, "quota_exceeded")
        assert found["asked"] == 120 * GIB
        body["template"] = {"image": "x"}
        answer = sandbox.client.post("/v1/instance-groups", json=body)
        assert answer.status_code == 201
        assert sandbox.client.get(f"/v1/projects/{limited}").json()["usage"]["disk_mib"] == 30 * GIB
        sandbox.client.delete(f"/v1/instance-groups/{answer.json()['id']}")


class TestRequiredLimits:
    def test_instances_run_only_on_nodes_that_enforce_limits(self, sandbox: Sandbox) -> None:
        report(sandbox, disk_facts())  # the first report is approved
        report(sandbox, disk_facts(enforced=False))
        limited = project(sandbox, require_disk_limits=True)
        ((code, wanted, _had),) = refusals(sandbox, project_id=limited)
        assert (code, wanted) == ("disk_not_limited", "a node that enforces disk_mib")
        waiting = sandbox.create(project_id=limited)["id"]
        assert sandbox.placed().disk_mib
        assert sandbox.client.instance(waiting)["state"] == "pending"
        report(sandbox, disk_facts())
        sandbox.client.wait(waiting, "scheduled")

    def test_pending_instances_follow_a_change_of_their_project(self, sandbox: Sandbox) -> None:
        report(sandbox, disk_facts(enforced=False))
        limited = project(sandbox, require_disk_limits=True)
        waiting = sandbox.create(project_id=limited)["id"]
        assert [code for code, *_ in refusals(sandbox, project_id=limited)] == ["disk_not_limited"]
        sandbox.client.patch(f"/v1/projects/{limited}", json={"require_disk_limits": False})
        sandbox.client.wait(waiting, "scheduled")

    def test_only_an_admin_changes_the_requirement(self, sandbox: Sandbox) -> None:
        limited = project(sandbox)
        made = sandbox.client.post(
            "/v1/api-keys", json={"name": "owner", "project_id": limited, "role": "owner"}
        ).json()
        answer = sandbox.client.patch(
            f"/v1/projects/{limited}",
            json={"require_disk_limits": True},
            headers={"Authorization": f"Bearer {made['key']}"},
        )
        problem(answer, 403, "forbidden")


class TestGuard:
    """An outdated placement is not written."""

    def create_pending(self, sandbox: Sandbox, **fields: Any) -> str:
        """Report disk pressure, so that the scheduler cannot place the new instance; return its ID."""
        report(sandbox, disk_facts(pressure=True))
        return str(sandbox.create(**fields)["id"])

    def assign(self, sandbox: Sandbox, instance_id: str, disk_mib: int) -> list[str]:
        """The ids that a placement with this disk would be written for; nothing stays written."""
        placement = Placement(instance_id, sandbox.node.id, (), 1000, 64, disk_mib=disk_mib)
        with sandbox.service.plane.database.write() as session:
            placed = placements.assign(session, [placement])
            session.rollback()
        return placed

    def test_a_placement_on_a_full_disk_is_rejected(self, sandbox: Sandbox) -> None:
        waiting = self.create_pending(sandbox, disk_mib=100 * GIB)
        node = sandbox.client.get(f"/v1/nodes/{sandbox.node.id}").json()
        assert node["disk_mib_free"] == 800 * GIB  # enough, but the disk has pressure
        assert self.assign(sandbox, waiting, 100 * GIB) == []
        self.report_without_pressure(sandbox, allocatable_mib=99 * GIB)
        assert self.assign(sandbox, waiting, 100 * GIB) == []

    def test_a_placement_with_less_disk_than_requested_is_rejected(self, sandbox: Sandbox) -> None:
        waiting = self.create_pending(sandbox, disk_mib=100 * GIB)
        self.report_without_pressure(sandbox, allocatable_mib=99 * GIB)
        assert self.assign(sandbox, waiting, 1) == []

    def test_a_placement_on_a_node_without_limits_is_rejected(self, sandbox: Sandbox) -> None:
        limited = project(sandbox, require_disk_limits=True)
        waiting = self.create_pending(sandbox, project_id=limited)
        self.report_without_pressure(sandbox, enforced=False)
        assert self.assign(sandbox, waiting, 10 * GIB) == []

    def report_without_pressure(self, sandbox: Sandbox, **changes: Any) -> None:
        """Report a disk without pressure; `changes` must still prevent the placement by the scheduler."""
        report(sandbox, disk_facts(**changes))


def test_an_instance_from_before_the_upgrade_keeps_running(sandbox: Sandbox) -> None:
    """The row of such an instance has no disk: the instance uses none, and its assignment has no limit."""
    running = sandbox.running()
    with sandbox.service.plane.database.write() as session:
        session.execute(update(Instance).where(Instance.id == running.instance_id).values(disk_mib=None))
    report(sandbox, disk_facts())
    assert sandbox.assignment(running.instance_id).disk_mib is None
    assert sandbox.client.instance(running.instance_id)["granted"]["disk_mib"] is None
    sandbox.sync(observed(running, "running"))
    assert sandbox.client.instance(running.instance_id)["state"] == "running"
