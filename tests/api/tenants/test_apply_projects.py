"""Applying projects by name, with quotas and members."""

from typing import Any

import pytest
from sqlalchemy import select

from mooring.db.tables import AuditEntry
from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client, RunningService

pytestmark = pytest.mark.both_databases

PROJECTS = "/v1/projects"
# Every setting, none with its default.
SETTINGS: dict[str, Any] = {
    "labels": {"a": "b"}, "quotas": {"gpus": 4, "gpus_by_model": {"H100": 2}, "cpus": 2.5}, "weight": 2,
    "allowed_images": ["docker.io/*"], "security_profile": "strict", "max_priority": 60,
    "guaranteed_gpus": 1, "gpu_sharing": True, "host_network": True, "node_selector": {"zone": "a"},
    "local_images": True, "require_disk_limits": True, "public_ports": True,
}  # fmt: skip


def _put(client: Client, name: str, /, **body: Any) -> Any:
    return client.put(f"{PROJECTS}/by-name/{name}", json=body)


def _user(client: Client, name: str) -> dict[str, Any]:
    made = client.post("/v1/users", json={"name": name, "email": f"{name}@example.com"})
    assert made.status_code == 201, made.text
    return dict(made.json())


def _members(client: Client, project_id: str) -> dict[str, str]:
    return {
        each["email"]: each["role"] for each in client.items(f"{PROJECTS}/{project_id}/members", limit=200)
    }


def _key(client: Client, project_id: str, **fields: Any) -> str:
    body = {"name": "k", "project_id": project_id, **fields}
    made = client.post("/v1/api-keys", json=body)
    assert made.status_code == 201, made.text
    return str(made.json()["key"])


def test_a_repeated_request_changes_nothing(shared_service: RunningService, shared: Client) -> None:
    ada = _user(shared, "ada-1")
    members = [{"email": ada["email"], "role": "owner"}]
    created = _put(shared, "twice", **SETTINGS, members=members)
    assert (created.status_code, created.headers["mooring-applied"]) == (201, "created")
    made = created.json()
    assert created.headers["location"] == f"{PROJECTS}/{made['id']}"
    assert made["version"] == 1
    assert {name: made[name] for name in SETTINGS if name != "quotas"} == {
        name: value for name, value in SETTINGS.items() if name != "quotas"
    }
    assert SETTINGS["quotas"].items() <= made["quotas"].items()
    assert _members(shared, made["id"]) == {ada["email"]: "owner"}
    by_id = [{"user_id": ada["id"], "role": "owner"}]
    for body in ({**SETTINGS, "members": members}, {**SETTINGS, "members": by_id}, SETTINGS):
        again = _put(shared, "twice", **body)
        assert (again.status_code, again.headers["mooring-applied"]) == (200, "unchanged")
        assert again.json() == made
    with shared_service.plane.database.read() as session:
        query = select(AuditEntry.action, AuditEntry.after).where(AuditEntry.target_id == made["id"])
        ((action, after),) = session.execute(query).all()
    assert after is not None
    assert (action, after["name"], after["members"]) == ("project.apply", "twice", {ada["id"]: "owner"})


def test_what_is_read_can_be_written_back(shared: Client) -> None:
    for name, body in (("back-1", SETTINGS), ("back-2", {})):
        shown = _put(shared, name, **body).json()
        answer = _put(shared, name, **{field: shown[field] for field in SETTINGS})
        assert answer.headers["mooring-applied"] == "unchanged"


def test_omitted_fields_have_their_defaults(shared: Client) -> None:
    plain = _put(shared, "plain").json()
    made = _put(shared, "changed", **SETTINGS).json()
    answer = _put(shared, "changed", quotas={"gpus": 8})
    assert (answer.status_code, answer.headers["mooring-applied"]) == (200, "changed")
    shown = answer.json()
    assert (shown["id"], shown["version"]) == (made["id"], 2)
    assert {name: shown[name] for name in SETTINGS} == {
        **{name: plain[name] for name in SETTINGS}, "quotas": {**plain["quotas"], "gpus": 8},
    }  # fmt: skip


def test_members_are_added_changed_and_removed(shared: Client) -> None:
    ada, bob, eve = (_user(shared, name) for name in ("ada-2", "bob-2", "eve-2"))
    made = _put(shared, "people", members=[
        {"email": ada["email"], "role": "owner"}, {"user_id": bob["id"], "role": "member"},
    ]).json()  # fmt: skip
    key = _key(shared, made["id"], user_id=bob["id"], role="member")
    body = {"members": [{"email": ada["email"], "role": "viewer"}, {"email": eve["email"], "role": "member"}]}
    plan = shared.put(f"{PROJECTS}/by-name/people", json=body, params={"dry_run": True}).json()
    assert {each["pointer"]: (each["before"], each["after"]) for each in plan["changes"]} == {
        f"/members/{ada['id']}": ('"owner"', '"viewer"'),
        f"/members/{bob['id']}": ('"member"', None),
        f"/members/{eve['id']}": (None, '"member"'),
    }
    assert _members(shared, made["id"]) == {ada["email"]: "owner", bob["email"]: "member"}
    answer = _put(shared, "people", **body)
    assert answer.headers["mooring-applied"] == "changed"
    assert _members(shared, made["id"]) == {ada["email"]: "viewer", eve["email"]: "member"}
    with Client(str(shared.base_url), key=key) as removed:
        problem(removed.get("/v1/instances"), 401, "unauthorized")
    assert _put(shared, "people").headers["mooring-applied"] == "unchanged"
    assert _put(shared, "people", members=[]).headers["mooring-applied"] == "changed"
    assert _members(shared, made["id"]) == {}


@pytest.mark.parametrize(
    ("members", "status", "code"),
    [
        ([{"email": "nobody@example.com", "role": "owner"}], 404, "not_found"),
        ([{"user_id": "usr_none", "role": "owner"}], 404, "not_found"),
        ([{"role": "owner"}], 422, "validation_failed"),
        ([{"email": "ada@example.com", "user_id": "usr_1", "role": "owner"}], 422, "validation_failed"),
        ([{"user_id": "usr_1", "role": "king"}], 422, "validation_failed"),
    ],
)
def test_an_invalid_member_creates_nothing(
    shared: Client, members: list[dict[str, str]], status: int, code: str
) -> None:
    problem(_put(shared, "invalid-member", members=members), status, code)
    assert shared.items(PROJECTS, name="invalid-member") == []


def test_a_member_is_listed_once(shared: Client) -> None:
    ada = _user(shared, "ada-3")
    members = [{"email": ada["email"], "role": "owner"}, {"user_id": ada["id"], "role": "viewer"}]
    found = problem(_put(shared, "listed-twice", members=members), 422, "validation_failed")
    assert [each["pointer"] for each in found["errors"]] == ["/members/1"]


def test_an_owner_changes_labels_and_members_only(shared: Client) -> None:
    ada, bob = _user(shared, "ada-4"), _user(shared, "bob-4")
    owners = [{"email": ada["email"], "role": "owner"}]
    made = _put(shared, "owned", quotas={"gpus": 4}, members=owners).json()
    key = _key(shared, made["id"], user_id=ada["id"], role="owner")
    with Client(str(shared.base_url), key=key) as owner:
        body = {"quotas": {"gpus": 4}, "labels": {"x": "y"}}
        both = [*owners, {"email": bob["email"], "role": "viewer"}]
        answer = _put(owner, "owned", **body, members=both)
        assert (answer.status_code, answer.headers["mooring-applied"]) == (200, "changed")
        assert _members(shared, made["id"]) == {ada["email"]: "owner", bob["email"]: "viewer"}
        changes: list[dict[str, Any]] = [
            {"quotas": {"gpus": 5}},
            {"quotas": {}},
            {**body, "public_ports": True},
        ]
        for change in changes:
            problem(_put(owner, "owned", **{"labels": {}, "members": owners, **change}), 403, "forbidden")
        assert _members(shared, made["id"]) == {ada["email"]: "owner", bob["email"]: "viewer"}
        assert shared.get(f"{PROJECTS}/{made['id']}").json()["labels"] == {"x": "y"}


def test_hidden_and_missing_projects_look_the_same(shared: Client) -> None:
    made = _put(shared, "hers").json()
    _put(shared, "secret-plans")
    with Client(str(shared.base_url), key=_key(shared, made["id"], role="owner")) as owner:
        hidden, missing = (
            problem(_put(owner, name, labels={}), 403, "forbidden")
            for name in ("secret-plans", "no-such-project")
        )
        assert hidden["detail"] == missing["detail"]
    with Client(str(shared.base_url), key=_key(shared, made["id"], role="member")) as member:
        problem(_put(member, "hers"), 403, "forbidden")


def test_the_default_project_can_be_applied(shared: Client) -> None:
    (default,) = shared.items(PROJECTS, name="default")
    answer = _put(shared, "default", **{name: default[name] for name in SETTINGS})
    assert (answer.status_code, answer.headers["mooring-applied"]) == (200, "unchanged")


def test_if_match(shared: Client) -> None:
    path, stale = f"{PROJECTS}/by-name/matched", {"If-Match": '"7"'}
    problem(shared.put(path, json={}, headers=stale), 412, "precondition_failed")
    _put(shared, "matched")
    problem(shared.put(path, json={}, headers=stale), 412, "precondition_failed")
    answer = shared.put(path, json={"labels": {"a": "b"}}, headers={"If-Match": '"1"'})
    assert answer.json()["version"] == 2


def test_the_body_may_not_name_another_project(shared: Client) -> None:
    problem(_put(shared, "here", name="there"), 422, "validation_failed")
    assert shared.items(PROJECTS, name="here") == []


def test_a_plan_creates_nothing(shared: Client) -> None:
    answer = shared.put(f"{PROJECTS}/by-name/planned", json=SETTINGS, params={"dry_run": True})
    assert answer.json() == {"outcome": "created", "id": None, "changes": []}
    assert shared.items(PROJECTS, name="planned") == []


def test_of_8_requests_exactly_one_creates(shared: Client) -> None:
    ada = _user(shared, "ada-5")
    body = {**SETTINGS, "members": [{"email": ada["email"], "role": "owner"}]}
    answers = run_concurrently(8, lambda _n: _put(shared, "contended", **body))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
