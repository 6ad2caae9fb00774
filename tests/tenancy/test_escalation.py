"""Getting more than was given: by fields that nobody offered, by keys, by roles, and by being quick."""

from typing import Any

import httpx
import pytest

from mooring.core.access import Role
from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import IMAGE, NOWHERE, Tenant, World, make_key, post
from tests.testbed.waiting import wait_until

SMUGGLED: dict[str, Any] = {
    "privileged": True,
    "binds": ["/:/host"],
    "volumes": ["/:/host"],
    "host_config": {"Privileged": True},
    "network_mode": "host",
    "pid_mode": "host",
    "cap_add": ["SYS_ADMIN"],
    "devices": ["/dev/mem"],
    "runtime": "other",
    "security_opt": ["seccomp=unconfined"],
    "security_profile": "standard",
    "state": "running",
    "desired_state": "running",
    "id": "ins_01k0000000000000000000000",
    "node_id": "nod_01k0000000000000000000000",
    "container_id": "x",
    "version": 1,
    "created_at": "2026-11-21T08:00:00Z",
}


@pytest.mark.parametrize("field", SMUGGLED)
def test_an_instance_takes_no_field_that_is_not_offered(world: World, field: str) -> None:
    made = world.a.member.post("/v1/instances", json={"image": IMAGE, field: SMUGGLED[field]})
    refused = problem(made, 422, "validation_failed")
    assert [error["pointer"] for error in refused["errors"]] == [f"/{field}"]
    changed = world.a.member.patch(f"/v1/instances/{world.waiting}", json={field: SMUGGLED[field]})
    problem(changed, 422, "validation_failed")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/v1/instances/{instance}", {"project_id": "{b}"}),
        ("PATCH", "/v1/projects/{a}", {"id": "{b}"}),
        ("PATCH", "/v1/projects/{a}", {"created_at": "2026-11-21T08:00:00Z"}),
        ("POST", "/v1/projects", {"name": "more", "quotas": {"gpus": 8}}),
        ("PUT", "/v1/projects/{a}/members/{viewer}", {"role": "admin"}),
        ("PUT", "/v1/projects/{a}/members/{viewer}", {"role": "viewer", "is_admin": True}),
        ("POST", "/v1/api-keys", {"name": "k", "role": "viewer", "key": "mk_chosen-by-myself"}),
        ("POST", "/v1/api-keys", {"name": "k", "role": "admin"}),
        ("POST", "/v1/api-keys", {"name": "k", "scopes": ["project:own"]}),
        ("POST", "/v1/api-keys", {"name": "k", "role": "viewer", "prefix": "mk_"}),
        ("POST", "/v1/users", {"name": "n", "issuer": "https://elsewhere.example", "subject": "1"}),
    ],
)
def test_nothing_else_takes_one_either(world: World, method: str, path: str, body: dict[str, Any]) -> None:
    known = {
        "a": world.a.id, "b": world.b.id, "instance": world.waiting,
        "viewer": world.a.people[Role.VIEWER].id,
    }  # fmt: skip
    filled = {key: value.format(**known) if isinstance(value, str) else value for key, value in body.items()}
    client = world.admin if path in {"/v1/projects", "/v1/users"} else world.a.owner
    problem(client.request(method, path.format(**known), json=filled), 422, "validation_failed")


@pytest.mark.parametrize(
    "change",
    [
        {"quotas": {"gpus": None}},
        {"weight": 1000},
        {"allowed_images": None},
        {"security_profile": "standard"},
        {"labels": {}, "quotas": {"gpus": 1000}},
    ],
)
def test_an_owner_does_not_raise_the_projects_share(world: World, change: dict[str, Any]) -> None:
    path = f"/v1/projects/{world.a.id}"
    before = world.a.owner.get(path).json()
    problem(world.a.owner.patch(path, json=change), 403, "forbidden")
    assert world.a.owner.get(path).json()["version"] == before["version"]


def test_a_key_gives_no_more_than_its_maker_has(world: World) -> None:
    viewer, member = world.a.people[Role.VIEWER], world.a.people[Role.MEMBER]
    more: list[tuple[Client, dict[str, Any]]] = [
        (viewer.client, {"user_id": viewer.id, "role": "member"}),
        (viewer.client, {"user_id": viewer.id, "scopes": ["instances:write"]}),
        (member.client, {"user_id": member.id, "role": "owner"}),
        (member.client, {"user_id": member.id, "role": "owner", "scopes": ["metrics:read"]}),
        (member.client, {"role": "viewer"}),  # a service's: owners make those
        (member.client, {"user_id": viewer.id, "role": "viewer"}),  # another's
        *((client, {"scopes": [scope]}) for client in (member.client, world.a.owner)
          for scope in ("admin", "metrics:read")),
    ]  # fmt: skip
    for client, body in more:
        answer = client.post("/v1/api-keys", json={"name": "k", **body})
        assert answer.status_code in {403, 422}, (body, answer.text)
    assert make_key(member.client, user_id=member.id, role="member")["role"] == "member"


def test_an_owner_gives_no_key_to_a_stranger(world: World) -> None:
    for stranger in (world.b.people[Role.OWNER].id, "usr_01k0000000000000000000000"):
        body = {"name": "k", "user_id": stranger, "role": "viewer"}
        problem(world.a.owner.post("/v1/api-keys", json=body), 404, "not_found")
    for owner in (world.a.owner, world.b.owner):
        mine = {
            "name": "k",
            "user_id": world.a.people[Role.OWNER].id,
            "role": "owner",
            "project_id": world.b.id,
        }
        problem(owner.post("/v1/api-keys", json=mine), 404, "not_found")


def test_an_admins_key_for_somebody_who_is_none_does_nothing(world: World) -> None:
    nobody = world.a.people[Role.VIEWER].id
    body = {"name": "k", "user_id": nobody, "scopes": ["admin"]}
    problem(world.admin.post("/v1/api-keys", json=body), 404, "not_found")


def _narrow(world: World, *scopes: str, **more: Any) -> Client:
    owner = world.a.people[Role.OWNER]
    key = make_key(owner.client, user_id=owner.id, scopes=list(scopes), **more)
    return Client(world.service.url, key=key["key"])


def test_a_narrowed_key_makes_none_that_is_broader(world: World) -> None:
    owner = world.a.people[Role.OWNER]
    with _narrow(world, "instances:read", role="owner") as narrow:
        assert narrow.get("/v1/me").json()["role"] is None
        for broader in ({"role": "owner"}, {"role": "viewer"}, {"scopes": ["instances:exec"]}):
            body = {"name": "k", "user_id": owner.id, **broader}
            problem(narrow.post("/v1/api-keys", json=body), 403, "forbidden")
        assert make_key(narrow, user_id=owner.id, scopes=["instances:read"])["scopes"] == ["instances:read"]
        problem(narrow.patch(f"/v1/projects/{world.a.id}", json={"labels": {}}), 403, "forbidden")
        problem(narrow.get("/v1/audit-log"), 403, "forbidden")


def test_a_key_that_ends_leaves_none_behind_that_lasts_longer(world: World) -> None:
    member = world.a.people[Role.MEMBER]
    ends = "2030-01-01T00:00:00.000Z"
    short = make_key(member.client, user_id=member.id, role="member", expires_at=ends)
    with Client(world.service.url, key=short["key"]) as client:
        for longer in (None, "2030-01-01T00:00:00.001Z"):
            body = {"name": "k", "user_id": member.id, "role": "viewer", "expires_at": longer}
            problem(client.post("/v1/api-keys", json=body), 403, "forbidden")
        assert make_key(client, user_id=member.id, role="viewer", expires_at=ends)["expires_at"] == ends


def test_a_key_to_look_with_does_not_take_away_the_others(world: World) -> None:
    owner = world.a.people[Role.OWNER]
    with _narrow(world, "instances:read") as narrow:
        problem(narrow.delete(f"/v1/api-keys/{owner.key['id']}"), 403, "forbidden")
        # Itself it may end: whoever finds that a key has leaked should.
        assert narrow.delete(f"/v1/api-keys/{narrow.get('/v1/me').json()['key']['id']}").status_code == 204
    assert owner.client.get("/v1/me").status_code == 200


@pytest.mark.parametrize("scope", ["instances:read", "instances:write", "usage:read"])
def test_exec_needs_its_own_scope(world: World, scope: str) -> None:
    scopes = {scope, "instances:read"}
    with _narrow(world, *scopes) as narrow:
        answer = narrow.post(f"/v1/instances/{world.running}/exec", json={"command": ["id"]})
        problem(answer, 403, "forbidden")


def test_a_narrowed_key_does_what_its_scopes_say(world: World) -> None:
    with _narrow(world, "instances:write") as writes:
        made = writes.post("/v1/instances", json={"image": IMAGE, "node_selector": NOWHERE})
        assert made.status_code == 201
        problem(writes.get(f"/v1/instances/{made.json()['id']}"), 403, "forbidden")
    with _narrow(world, "usage:read") as counts:
        problem(counts.get("/v1/instances"), 403, "forbidden")
        problem(counts.post("/v1/instances", json={"image": IMAGE}), 403, "forbidden")


@pytest.fixture
def tenant(world: World, request: pytest.FixtureRequest) -> Any:
    """A tenant of this test alone."""
    made = Tenant(world.admin, f"t{abs(hash(request.node.name)) % 10**9}")
    yield made
    made.close()


REVOCATION_S = 1.0


@pytest.mark.parametrize("way", ["membership", "demotion", "user"])
def test_a_personal_key_dies_with_what_it_stood_for(world: World, tenant: Tenant, way: str) -> None:
    person = tenant.people[Role.MEMBER]
    member = f"/v1/projects/{tenant.id}/members/{person.id}"
    instance = world.waiting_instance(person.client)  # and by this the key is remembered
    if way == "membership":
        assert tenant.owner.delete(member).status_code == 204
        expected = 401
    elif way == "demotion":
        assert tenant.owner.put(member, json={"role": "viewer"}).status_code == 200
        expected = 403
    else:
        assert world.admin.delete(f"/v1/users/{person.id}").status_code == 204
        expected = 401
    path = f"/v1/instances/{instance}"
    wait_until(lambda: person.client.patch(path, json={"labels": {}}).status_code == expected, REVOCATION_S)
    # What the person started runs on: it is the project's.
    assert tenant.owner.get(path).status_code == 200


def test_a_service_key_outlives_the_person_who_made_it(world: World, tenant: Tenant) -> None:
    key = make_key(tenant.owner, role="viewer")
    assert world.admin.delete(f"/v1/users/{tenant.people[Role.OWNER].id}").status_code == 204
    with Client(world.service.url, key=key["key"]) as service:
        assert service.get("/v1/me").status_code == 200


def test_a_project_is_not_deleted_while_instances_live_there(world: World, tenant: Tenant) -> None:
    path = f"/v1/projects/{tenant.id}"
    instance = world.waiting_instance(tenant.member)
    problem(world.admin.delete(path), 409, "project_in_use")
    assert tenant.member.delete(f"/v1/instances/{instance}").status_code == 202
    post(tenant.owner, "/v1/secrets", name="token", value="x")
    post(tenant.owner, "/v1/registries", server="ghcr.io", username="u", password="x")
    assert world.admin.delete(path).status_code == 204
    problem(world.admin.get(path), 404, "not_found")
    for person in tenant.people.values():
        wait_until(lambda client=person.client: client.get("/v1/me").status_code == 401, REVOCATION_S)  # type: ignore[misc]
    assert world.admin.items("/v1/secrets", project_id=tenant.id) == []
    # Its name is free again, and its audit log stays.
    post(world.admin, "/v1/projects", name=tenant.name)
    assert world.admin.items("/v1/audit-log", project_id=tenant.id) != []


def test_the_default_project_stays(world: World) -> None:
    default = world.service.plane.identity.default_project_id
    path = f"/v1/projects/{default}"
    problem(world.admin.delete(path), 409, "default_project")
    # It is found by its name at each start; whoever took that name would be sent what admins make.
    problem(world.admin.patch(path, json={"name": "main"}), 409, "default_project")
    assert world.admin.patch(path, json={"name": "default", "labels": {}}).status_code == 200


def test_nobody_is_taken_in_who_is_being_deleted(world: World) -> None:
    for number in range(8):
        user = post(world.admin, "/v1/users", name=f"short-{number}")["id"]
        member = f"/v1/projects/{world.b.id}/members/{user}"

        def act(which: int, user: str = user, member: str = member) -> httpx.Response:
            if which == 0:
                return world.admin.delete(f"/v1/users/{user}")
            return world.admin.put(member, json={"role": "member"})

        deleted, taken_in = run_concurrently(2, act)
        assert (deleted.status_code, taken_in.status_code) in {(204, 200), (204, 404)}
        members = world.admin.items(f"/v1/projects/{world.b.id}/members", limit=200)
        assert user not in {item["user_id"] for item in members}


@pytest.mark.parametrize(
    ("path", "field", "value", "code"),
    [
        ("/v1/projects", "name", "raced", "name_taken"),
        ("/v1/users", "email", "raced@x.example", "email_taken"),
    ],
)
def test_of_many_at_once_one_is_given_a_name(
    world: World, path: str, field: str, value: str, code: str
) -> None:
    body = {"name": "raced", field: value}
    answers = run_concurrently(6, lambda _: world.admin.post(path, json=body))
    refused = [answer for answer in answers if answer.status_code != 201]
    assert len(refused) == 5
    for answer in refused:
        problem(answer, 409, code)


@pytest.mark.parametrize("path", ["/v1/instances", "/v1/api-keys", "/v1/secrets"])
def test_nothing_new_survives_in_a_project_that_is_being_deleted(world: World, path: str) -> None:
    """Either it came first and is counted, or the project is gone; never a thing in no project."""
    bodies: dict[str, Any] = {
        "/v1/instances": {"image": IMAGE, "node_selector": NOWHERE},
        "/v1/api-keys": {"name": "k", "role": "viewer"},
        "/v1/secrets": {"name": "token", "value": "x"},
    }
    for number in range(8):
        project = post(world.admin, "/v1/projects", name=f"short-{path[4:7]}-{number}")["id"]
        body = {**bodies[path], "project_id": project}

        def act(which: int, project: str = project, body: dict[str, Any] = body) -> httpx.Response:
            if which == 0:
                return world.admin.delete(f"/v1/projects/{project}")
            return world.admin.post(path, json=body)

        deleted, made = run_concurrently(2, act)
        outcome = (deleted.status_code, made.status_code)
        left = world.admin.items(path, project_id=project)
        if path == "/v1/instances":
            assert outcome in {(204, 404), (409, 201)}, (deleted.text, made.text)
            assert len(left) == (1 if made.status_code == 201 else 0)
        else:
            assert outcome in {(204, 404), (204, 201)}, (deleted.text, made.text)
            assert left == []


def test_an_instance_that_is_deleted_while_it_is_created_leaves_nothing(world: World) -> None:
    selector = {"sandbox": "working"}
    for _ in range(5):
        made = world.a.member.create(node_selector=selector, gpus={"count": 1})["id"]
        path = f"/v1/instances/{made}"
        answers = run_concurrently(4, lambda _number, path=path: world.a.member.delete(path))  # type: ignore[misc]
        assert {answer.status_code for answer in answers} <= {202, 404}
        wait_until(lambda path=path: world.a.member.get(path).status_code == 404)  # type: ignore[misc]
    held = {gpu["instance_id"] for gpu in world.admin.items("/v1/gpus", node_id=world.working.id)}
    assert held == {None, world.running}
