"""Disk space of nodes, instances and projects over the API, and the guard at the write."""

from typing import Any

import pytest
from sqlalchemy import update

from mooring.control.instances import placements
from mooring.core.disk import DiskFacts
from mooring.db.tables import Instance
from mooring.scheduler.model import Placement
from tests.api.conftest import Corner
from tests.nodes import seen
from tests.problems import problem

GIB = 1024


def disk(**changes: Any) -> DiskFacts:
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


def report(corner: Corner, facts: DiskFacts | None) -> None:
    corner.node.facts = corner.node.facts.model_copy(update={"disk": facts})
    corner.sync(*corner.ran)


def dry_run(corner: Corner, **fields: Any) -> dict[str, Any]:
    body = {"image": "busybox", "node_selector": {"corner": corner.node.name}, **fields}
    answer = corner.client.post("/v1/instances", params={"dry_run": True}, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusals(corner: Corner, **fields: Any) -> list[tuple[str, str, str]]:
    found = dry_run(corner, **fields)["refusals"]
    mine = [each for each in found if each["node_id"] == corner.node.id]
    return [(each["code"], each["wanted"], each["had"]) for each in mine]


def project(corner: Corner, **changes: Any) -> str:
    made = corner.client.post("/v1/projects", json={"name": f"disk-of-{corner.node.name}"}).json()["id"]
    answer = corner.client.patch(f"/v1/projects/{made}", json=changes)
    assert answer.status_code == 200, answer.text
    return str(made)


def test_a_node_shows_its_disk(corner: Corner) -> None:
    shown = corner.client.get(f"/v1/nodes/{corner.node.id}").json()
    assert (shown["disk_mib"], shown["disk_enforced"], shown["storage"]) == (None, None, None)
    report(corner, disk())
    corner.placed(disk_mib=100 * GIB)
    shown = corner.client.get(f"/v1/nodes/{corner.node.id}").json()
    assert (shown["disk_mib"], shown["disk_allocatable_mib"]) == (1000 * GIB, 800 * GIB)
    assert (shown["disk_mib_free"], shown["disk_enforced"]) == (700 * GIB, True)
    assert shown["storage"] == {
        "driver": "overlay2",
        "filesystem": "xfs",
        "available_mib": 900 * GIB,
        "images_mib": 5 * GIB,
        "pressure": False,
    }


def test_an_instance_is_given_its_disk_or_the_default(corner: Corner) -> None:
    report(corner, disk())
    asked, left_open = corner.placed(disk_mib=100 * GIB), corner.placed()
    assert (asked.disk_mib, left_open.disk_mib) == (100 * GIB, 10 * GIB)
    shown = corner.client.instance(asked.instance_id)
    assert (shown["disk_mib"], shown["granted"]["disk_mib"]) == (100 * GIB, 100 * GIB)
    shown = corner.client.instance(left_open.instance_id)
    assert (shown["disk_mib"], shown["granted"]["disk_mib"]) == (None, 10 * GIB)


def test_disk_runs_out_and_comes_back(corner: Corner) -> None:
    report(corner, disk())
    first = corner.running(disk_mib=700 * GIB)
    assert refusals(corner, disk_mib=101 * GIB) == [("insufficient_disk", "101 GiB", "100 GiB")]
    waits = corner.create(disk_mib=101 * GIB)["id"]
    explained = corner.client.get(f"/v1/instances/{waits}/explain").json()
    assert explained["state"] == "pending"
    assert "insufficient_disk" in {each["code"] for each in explained["refusals"]}
    corner.client.delete(f"/v1/instances/{first.instance_id}")
    corner.ran.clear()
    corner.sync()
    corner.client.wait(waits, "scheduled")


@pytest.mark.parametrize("asked", [63, 2**31, -1, 0.5, "64"])
def test_what_is_no_size_is_refused(corner: Corner, asked: Any) -> None:
    answer = corner.client.post("/v1/instances", json={"image": "busybox", "disk_mib": asked})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/disk_mib"


def test_a_node_of_an_earlier_release_takes_what_asks_for_no_disk(corner: Corner) -> None:
    assert corner.placed().disk_mib == 10 * GIB
    ((code, _wanted, had),) = refusals(corner, disk_mib=GIB)
    assert (code, had) == ("insufficient_disk", "unknown: its agent does not report it")


def test_a_nearly_full_node_gets_nothing_new(corner: Corner) -> None:
    report(corner, disk())
    runs = corner.running()
    report(corner, disk(pressure=True))
    assert [code for code, *_ in refusals(corner)] == ["disk_pressure"]
    shown = corner.client.get(f"/v1/nodes/{corner.node.id}").json()
    assert (shown["state"], shown["storage"]["pressure"]) == ("ready", True)
    assert corner.client.instance(runs.instance_id)["state"] == "running"
    report(corner, disk())
    assert dry_run(corner)["placeable"]


class TestQuotas:
    def test_disk_is_counted_from_the_moment_it_is_asked_for(self, corner: Corner) -> None:
        report(corner, disk())
        of = project(corner, quotas={"disk_mib": 100 * GIB})
        corner.placed(project_id=of, disk_mib=80 * GIB)
        corner.placed(project_id=of)
        usage = corner.client.get(f"/v1/projects/{of}").json()["usage"]
        assert usage["disk_mib"] == 90 * GIB
        body = {"image": "busybox", "project_id": of, "disk_mib": 11 * GIB}
        found = problem(corner.client.post("/v1/instances", json=body), 403, "quota_exceeded")
        assert (found["quota"], found["limit"], found["used"]) == ("disk_mib", 100 * GIB, 90 * GIB)
        corner.placed(project_id=of, disk_mib=10 * GIB)

    def test_a_group_counts_as_all_of_its_members(self, corner: Corner) -> None:
        of = project(corner, quotas={"disk_mib": 100 * GIB})
        body = {"name": "g", "project_id": of, "count": 3, "template": {"image": "x", "disk_mib": 40 * GIB}}
        found = problem(corner.client.post("/v1/instance-groups", json=body), 403, "quota_exceeded")
        assert found["asked"] == 120 * GIB
        body["template"] = {"image": "x"}
        answer = corner.client.post("/v1/instance-groups", json=body)
        assert answer.status_code == 201
        assert corner.client.get(f"/v1/projects/{of}").json()["usage"]["disk_mib"] == 30 * GIB
        corner.client.delete(f"/v1/instance-groups/{answer.json()['id']}")


class TestRequiredLimits:
    def test_its_instances_run_only_where_limits_are_enforced(self, corner: Corner) -> None:
        report(corner, disk())  # what is approved of it
        report(corner, disk(enforced=False))
        of = project(corner, require_disk_limits=True)
        ((code, wanted, _had),) = refusals(corner, project_id=of)
        assert (code, wanted) == ("disk_not_limited", "a node that enforces disk_mib")
        waits = corner.create(project_id=of)["id"]
        assert corner.placed().disk_mib
        assert corner.client.instance(waits)["state"] == "pending"
        report(corner, disk())
        corner.client.wait(waits, "scheduled")

    def test_what_waits_heeds_a_change_of_its_project(self, corner: Corner) -> None:
        report(corner, disk(enforced=False))
        of = project(corner, require_disk_limits=True)
        waits = corner.create(project_id=of)["id"]
        assert [code for code, *_ in refusals(corner, project_id=of)] == ["disk_not_limited"]
        corner.client.patch(f"/v1/projects/{of}", json={"require_disk_limits": False})
        corner.client.wait(waits, "scheduled")

    def test_only_an_admin_says_so(self, corner: Corner) -> None:
        of = project(corner)
        made = corner.client.post(
            "/v1/api-keys", json={"name": "owner", "project_id": of, "role": "owner"}
        ).json()
        answer = corner.client.patch(
            f"/v1/projects/{of}",
            json={"require_disk_limits": True},
            headers={"Authorization": f"Bearer {made['key']}"},
        )
        problem(answer, 403, "forbidden")


class TestGuard:
    """A plan that is wrong by now is not written down."""

    def pending(self, corner: Corner, **fields: Any) -> str:
        """One that the scheduler itself cannot place."""
        report(corner, disk(pressure=True))
        return str(corner.create(**fields)["id"])

    def assign(self, corner: Corner, instance_id: str, disk_mib: int) -> list[str]:
        placement = Placement(instance_id, corner.node.id, (), 1000, 64, disk_mib=disk_mib)
        with corner.service.plane.database.write() as session:
            placed = placements.assign(session, [placement])
            session.rollback()
        return placed

    def test_a_full_disk(self, corner: Corner) -> None:
        waits = self.pending(corner, disk_mib=100 * GIB)
        node = corner.client.get(f"/v1/nodes/{corner.node.id}").json()
        assert self.assign(corner, waits, 100 * GIB) == []
        self.unpressed(corner, allocatable_mib=99 * GIB)
        assert self.assign(corner, waits, 100 * GIB) == []
        assert node["disk_mib_free"] == 800 * GIB

    def test_less_than_was_asked_for(self, corner: Corner) -> None:
        waits = self.pending(corner, disk_mib=100 * GIB)
        self.unpressed(corner, allocatable_mib=99 * GIB)
        assert self.assign(corner, waits, 1) == []

    def test_a_node_without_limits(self, corner: Corner) -> None:
        of = project(corner, require_disk_limits=True)
        waits = self.pending(corner, project_id=of)
        self.unpressed(corner, enforced=False)
        assert self.assign(corner, waits, 10 * GIB) == []

    def unpressed(self, corner: Corner, **changes: Any) -> None:
        """The node as it is told to the guard, on which the scheduler would place nothing of this either."""
        report(corner, disk(**changes))


def test_an_instance_that_ran_before_the_upgrade_goes_on(corner: Corner) -> None:
    """Its row has no disk: it holds none, and its node hears of no limit."""
    runs = corner.running()
    with corner.service.plane.database.write() as session:
        session.execute(update(Instance).where(Instance.id == runs.instance_id).values(disk_mib=None))
    report(corner, disk())
    assert corner.assignment(runs.instance_id).disk_mib is None
    assert corner.client.instance(runs.instance_id)["granted"]["disk_mib"] is None
    corner.sync(seen(runs, "running"))
