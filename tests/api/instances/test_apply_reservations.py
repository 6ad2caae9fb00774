"""Applying reservations by name."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.concurrency import run_concurrently
from tests.nodes import WireNode
from tests.problems import problem
from tests.service import Client
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases

RESERVATIONS = "/v1/reservations"
_number = iter(range(1000))


def _in(seconds: float) -> Any:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


class ReservedModel:
    """A node with four GPUs of a model that no other test uses, and a project."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.model = f"R{next(_number)}"
        self.node = WireNode(client, self.model.lower(), gpus=4, model=f"NVIDIA {self.model}")
        self.node.sync()
        made = client.post("/v1/projects", json={"name": f"for-{self.model.lower()}"})
        self.project = made.json()["id"]

    def put(self, name: str = "course", *, headers: Any = None, dry_run: bool = False, **fields: Any) -> Any:
        body = {
            "project_id": self.project, "gpus": {"count": 2, "model": self.model}, **fields,
        }  # fmt: skip
        params = {"dry_run": True} if dry_run else {}
        path = f"{RESERVATIONS}/by-name/{name}"
        return self.client.put(path, json=body, headers=headers, params=params)

    def listed(self) -> list[dict[str, Any]]:
        return self.client.items(RESERVATIONS, project_id=self.project)


@pytest.fixture
def reserved(shared: Client) -> Iterator[ReservedModel]:
    made = ReservedModel(shared)
    yield made
    for each in made.listed():
        shared.delete(f"{RESERVATIONS}/{each['id']}")
    shared.delete(f"/v1/nodes/{made.node.id}", params={"force": True})
    made.node.close()


def test_a_repeated_request_changes_nothing(reserved: ReservedModel) -> None:
    period: dict[str, Any] = {"from": _in(3600), "to": _in(7200)}
    created = reserved.put(**period)
    assert (created.status_code, created.headers["mooring-applied"]) == (201, "created")
    assert created.headers["location"] == f"{RESERVATIONS}/{created.json()['id']}"
    again = reserved.put(**period, name="course")
    assert (again.status_code, again.headers["mooring-applied"]) == (200, "unchanged")
    assert again.json() == created.json()
    shown = {name: created.json()[name] for name in ("gpus", "from", "to")}
    assert reserved.put(**shown).headers["mooring-applied"] == "unchanged"
    assert len(reserved.listed()) == 1


@pytest.mark.parametrize("start", [None, -3600])
def test_a_start_in_the_past_is_that_of_one_which_has_begun(
    reserved: ReservedModel, start: float | None
) -> None:
    period: dict[str, Any] = {"to": _in(7200), **({} if start is None else {"from": _in(start)})}
    made = reserved.put(**period).json()
    assert made["state"] == "active"
    for other in (period, {"to": period["to"]}, {**period, "from": _in(-60)}):
        answer = reserved.put(**other)
        assert (answer.headers["mooring-applied"], answer.json()["version"]) == ("unchanged", 1)


def test_the_period_is_changed(reserved: ReservedModel) -> None:
    made = reserved.put(**{"from": _in(3600), "to": _in(7200)}).json()
    end = _in(10_800)
    later = reserved.put(**{"from": made["from"], "to": end})
    assert (later.status_code, later.headers["mooring-applied"]) == (200, "changed")
    assert (later.json()["id"], later.json()["version"]) == (made["id"], 2)
    plan = reserved.put(**{"from": _in(-1), "to": end}, dry_run=True).json()
    assert [(each["pointer"], each["fixed"]) for each in plan["changes"]] == [("/from", False)]
    begun = reserved.put(**{"from": _in(-1), "to": end})
    assert (begun.json()["state"], begun.json()["id"]) == ("active", made["id"])
    problem(reserved.put(to=_in(-1)), 422, "bad_period")


def test_other_gpus_require_a_new_one(reserved: ReservedModel) -> None:
    end = _in(7200)
    made = reserved.put(to=end).json()
    other = {"count": 3, "model": reserved.model}
    found = problem(reserved.put(to=_in(9000), gpus=other), 409, "requires_replacement")
    assert (found["pointers"], found["id"]) == (["/gpus/count"], made["id"])
    assert reserved.put(to=end).headers["mooring-applied"] == "unchanged"


def test_one_that_has_ended_is_kept_unless_it_differs(reserved: ReservedModel) -> None:
    end = _in(1.5)
    made = reserved.put(to=end).json()
    path = f"{RESERVATIONS}/{made['id']}"
    wait_until(lambda: reserved.client.get(path).json()["state"] == "ended")
    same = reserved.put(to=end)
    assert (same.status_code, same.json()["id"]) == (200, made["id"])
    another = reserved.put(to=_in(3600))
    assert another.status_code == 201
    assert another.json()["id"] != made["id"]
    assert len(reserved.listed()) == 2
    assert reserved.put(to=another.json()["to"]).json()["id"] == another.json()["id"]


def test_the_newest_of_a_name_counts(reserved: ReservedModel) -> None:
    gpus, end = {"count": 1, "model": reserved.model}, _in(3600)
    body = {"name": "course", "project_id": reserved.project, "gpus": gpus, "to": end}
    first, second = (reserved.client.post(RESERVATIONS, json=body).json() for _ in range(2))
    answer = reserved.put(gpus=gpus, to=end)
    assert answer.json()["id"] == second["id"] != first["id"]


def test_too_few_gpus_create_nothing(reserved: ReservedModel) -> None:
    for dry_run in (True, False):
        answer = reserved.put(gpus={"count": 5, "model": reserved.model}, to=_in(60), dry_run=dry_run)
        problem(answer, 409, "insufficient_capacity")
    assert reserved.put(to=_in(60), dry_run=True).json()["outcome"] == "created"
    assert reserved.listed() == []


def test_if_match(reserved: ReservedModel) -> None:
    stale, end = {"If-Match": '"9"'}, _in(3600)
    problem(reserved.put(to=end, headers=stale), 412, "precondition_failed")
    reserved.put(to=end)
    problem(reserved.put(to=end, headers=stale), 412, "precondition_failed")
    assert reserved.put(to=end, headers={"If-Match": '"1"'}).status_code == 200


def test_of_8_requests_exactly_one_creates(reserved: ReservedModel) -> None:
    period: dict[str, Any] = {"from": _in(3600), "to": _in(7200)}
    answers = run_concurrently(8, lambda _n: reserved.put(**period))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len(reserved.listed()) == 1
