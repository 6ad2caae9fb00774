"""Privilege escalation by unknown fields, keys, roles and races."""

from typing import Any

import httpx
import pytest

from mooring_client.schemas.projects import Role
from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client
from tests.tenancy.tenants import IMAGE, NOWHERE, Setup, Tenant, make_key, post
from tests.testbed.waiting import wait_until

FORBIDDEN_FIELDS: dict[str, Any] = {
    "privileged": True,
    "binds": ["/:/host"],
    "volumes_from": ["other"],
    "mounts": [{"Type": "bind", "Source": "/", "Target": "/host"}],
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


@pytest.mark.parametrize("field", FORBIDDEN_FIELDS)
def test_an_instance_rejects_unknown_and_read_only_fields(setup: Setup, field: str) -> None:
    made = setup.a.member.post("/v1/instances", json={"image": IMAGE, field: FORBIDDEN_FIELDS[field]})
    rejected = problem(made, 422, "validation_failed")
    assert [error["pointer"] for error in rejected["errors"]] == [f"/{field}"]
    changed = setup.a.member.patch(f"/v1/instances/{setup.pending}", json={field: FORBIDDEN_FIELDS[field]})
    problem(changed, 422, "validation_failed")


@pytest.mark.parametrize(
    "volume", ["/:/host", {"volume": "/", "path": "/host"}, {"volume": "../../etc", "path": "/host"}]
)
def test_an_instance_mounts_no_folder_of_a_node(setup: Setup, volume: Any) -> None:
    body = {"image": IMAGE, "volumes": [volume]}
    found = problem(setup.a.member.post("/v1/instances", json=body), 422)
    assert found["errors"][0]["pointer"].startswith("/volumes/0")


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
def test_other_resources_reject_unknown_and_read_only_fields(
    setup: Setup, method: str, path: str, body: dict[str, Any]
) -> None:
    known = {
        "a": setup.a.id, "b": setup.b.id, "instance": setup.pending,
        "viewer": setup.a.people[Role.VIEWER].id,
    }  # fmt: skip
    filled = {key: value.format(**known) if isinstance(value, str) else value for key, value in body.items()}
    client = setup.admin if path in {"/v1/projects", "/v1/users"} else setup.a.owner
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
def test_an_owner_cannot_change_quotas_weight_and_policies(setup: Setup, change: dict[str, Any]) -> None:
    path = f"/v1/projects/{setup.a.id}"
    before = setup.a.owner.get(path).json()
    problem(setup.a.owner.patch(path, json=change), 403, "forbidden")
    assert setup.a.owner.get(path).json()["version"] == before["version"]


def test_a_key_has_at_most_its_creators_permissions(setup: Setup) -> None:
    viewer, member = setup.a.people[Role.VIEWER], setup.a.people[Role.MEMBER]
    excessive: list[tuple[Client, dict[str, Any]]] = [
        (viewer.client, {"user_id": viewer.id, "role": "member"}),
        (viewer.client, {"user_id": viewer.id, "scopes": ["instances:write"]}),
        (member.client, {"user_id": member.id, "role": "owner"}),
        (member.client, {"user_id": member.id, "role": "owner", "scopes": ["metrics:read"]}),
        (member.client, {"role": "viewer"}),  # a service key, which only owners may create
        (member.client, {"user_id": viewer.id, "role": "viewer"}),  # a key for another user
        *((client, {"scopes": [scope]}) for client in (member.client, setup.a.owner)
          for scope in ("admin", "metrics:read")),
    ]  # fmt: skip
    for client, body in excessive:
        answer = client.post("/v1/api-keys", json={"name": "k", **body})
        assert answer.status_code in {403, 422}, (body, answer.text)
    assert make_key(member.client, user_id=member.id, role="member")["role"] == "member"


def test_an_owner_cannot_create_keys_for_non_members(setup: Setup) -> None:
    for non_member in (setup.b.people[Role.OWNER].id, "usr_01k0000000000000000000000"):
        body = {"name": "k", "user_id": non_member, "role": "viewer"}
        problem(setup.a.owner.post("/v1/api-keys", json=body), 404, "not_found")
    for owner in (setup.a.owner, setup.b.owner):
        body = {
            "name": "k",
            "user_id": setup.a.people[Role.OWNER].id,
            "role": "owner",
            "project_id": setup.b.id,
        }
        problem(owner.post("/v1/api-keys", json=body), 404, "not_found")


def test_an_admin_key_cannot_be_created_for_a_user_who_is_no_admin(setup: Setup) -> None:
    viewer = setup.a.people[Role.VIEWER].id
    body = {"name": "k", "user_id": viewer, "scopes": ["admin"]}
    problem(setup.admin.post("/v1/api-keys", json=body), 404, "not_found")


def _restricted_client(setup: Setup, *scopes: str, **more: Any) -> Client:
    owner = setup.a.people[Role.OWNER]
    key = make_key(owner.client, user_id=owner.id, scopes=list(scopes), **more)
    return Client(setup.service.url, key=key["key"])


def test_a_restricted_key_cannot_create_a_broader_key(setup: Setup) -> None:
    owner = setup.a.people[Role.OWNER]
    with _restricted_client(setup, "instances:read", role="owner") as restricted:
        assert restricted.get("/v1/me").json()["role"] is None
        for broader in ({"role": "owner"}, {"role": "viewer"}, {"scopes": ["instances:exec"]}):
            body = {"name": "k", "user_id": owner.id, **broader}
            problem(restricted.post("/v1/api-keys", json=body), 403, "forbidden")
        assert make_key(restricted, user_id=owner.id, scopes=["instances:read"])["scopes"] == [
            "instances:read"
        ]
        problem(restricted.patch(f"/v1/projects/{setup.a.id}", json={"labels": {}}), 403, "forbidden")
        problem(restricted.get("/v1/audit-log"), 403, "forbidden")


def test_a_key_cannot_create_a_key_that_expires_later(setup: Setup) -> None:
    member = setup.a.people[Role.MEMBER]
    ends = "2030-01-01T00:00:00.000Z"
    short = make_key(member.client, user_id=member.id, role="member", expires_at=ends)
    with Client(setup.service.url, key=short["key"]) as client:
        for longer in (None, "2030-01-01T00:00:00.001Z"):
            body = {"name": "k", "user_id": member.id, "role": "viewer", "expires_at": longer}
            problem(client.post("/v1/api-keys", json=body), 403, "forbidden")
        assert make_key(client, user_id=member.id, role="viewer", expires_at=ends)["expires_at"] == ends


def test_a_read_only_key_can_revoke_only_itself(setup: Setup) -> None:
    owner = setup.a.people[Role.OWNER]
    with _restricted_client(setup, "instances:read") as restricted:
        problem(restricted.delete(f"/v1/api-keys/{owner.key['id']}"), 403, "forbidden")
        # A key may revoke itself, since anyone who finds a leaked key should be able to.
        own_id = restricted.get("/v1/me").json()["key"]["id"]
        assert restricted.delete(f"/v1/api-keys/{own_id}").status_code == 204
    assert owner.client.get("/v1/me").status_code == 200


@pytest.mark.parametrize("scope", ["instances:read", "instances:write", "usage:read"])
def test_exec_needs_its_own_scope(setup: Setup, scope: str) -> None:
    scopes = {scope, "instances:read"}
    with _restricted_client(setup, *scopes) as restricted:
        answer = restricted.post(f"/v1/instances/{setup.running}/exec", json={"command": ["id"]})
        problem(answer, 403, "forbidden")


def test_a_restricted_key_can_do_only_what_its_scopes_allow(setup: Setup) -> None:
    with _restricted_client(setup, "instances:write") as writer:
        made = writer.post("/v1/instances", json={"image": IMAGE, "node_selector": NOWHERE})
        assert made.status_code == 201
        problem(writer.get(f"/v1/instances/{made.json()['id']}"), 403, "forbidden")
    with _restricted_client(setup, "usage:read") as usage_reader:
        problem(usage_reader.get("/v1/instances"), 403, "forbidden")
        problem(usage_reader.post("/v1/instances", json={"image": IMAGE}), 403, "forbidden")


@pytest.fixture
def tenant(setup: Setup, request: pytest.FixtureRequest) -> Any:
    """A tenant for a single test."""
    made = Tenant(setup.admin, f"t{abs(hash(request.node.name)) % 10**9}")
    yield made
    made.close()


# The time within which the loss of a permission takes effect.
REVOCATION_S = 1.0


@pytest.mark.parametrize("lost", ["membership", "role", "user"])
def test_a_personal_key_loses_what_its_user_loses(setup: Setup, tenant: Tenant, lost: str) -> None:
    person = tenant.people[Role.MEMBER]
    member = f"/v1/projects/{tenant.id}/members/{person.id}"
    instance = setup.pending_instance(person.client)  # so that the key is cached
    if lost == "membership":
        assert tenant.owner.delete(member).status_code == 204
        expected = 401
    elif lost == "role":
        assert tenant.owner.put(member, json={"role": "viewer"}).status_code == 200
        expected = 403
    else:
        assert setup.admin.delete(f"/v1/users/{person.id}").status_code == 204
        expected = 401
    path = f"/v1/instances/{instance}"
    wait_until(lambda: person.client.patch(path, json={"labels": {}}).status_code == expected, REVOCATION_S)
    # The user's instances belong to the project and remain.
    assert tenant.owner.get(path).status_code == 200


def test_a_service_key_outlives_its_creator(setup: Setup, tenant: Tenant) -> None:
    key = make_key(tenant.owner, role="viewer")
    assert setup.admin.delete(f"/v1/users/{tenant.people[Role.OWNER].id}").status_code == 204
    with Client(setup.service.url, key=key["key"]) as service:
        assert service.get("/v1/me").status_code == 200


def test_a_project_with_instances_cannot_be_deleted(setup: Setup, tenant: Tenant) -> None:
    path = f"/v1/projects/{tenant.id}"
    instance = setup.pending_instance(tenant.member)
    problem(setup.admin.delete(path), 409, "project_in_use")
    assert tenant.member.delete(f"/v1/instances/{instance}").status_code == 202
    post(tenant.owner, "/v1/secrets", name="token", value="x")
    post(tenant.owner, "/v1/registries", server="ghcr.io", username="u", password="x")
    assert setup.admin.delete(path).status_code == 204
    problem(setup.admin.get(path), 404, "not_found")
    for person in tenant.people.values():
        wait_until(lambda client=person.client: client.get("/v1/me").status_code == 401, REVOCATION_S)  # type: ignore[misc]
    assert setup.admin.items("/v1/secrets", project_id=tenant.id) == []
    # The name can be used again, and the audit log remains.
    post(setup.admin, "/v1/projects", name=tenant.name)
    assert setup.admin.items("/v1/audit-log", project_id=tenant.id) != []


def test_the_default_project_cannot_be_deleted_or_renamed(setup: Setup) -> None:
    default = setup.service.plane.identity.default_project_id
    path = f"/v1/projects/{default}"
    problem(setup.admin.delete(path), 409, "default_project")
    # The server finds it by its name at each start: otherwise another project of that name would be used.
    problem(setup.admin.patch(path, json={"name": "main"}), 409, "default_project")
    assert setup.admin.patch(path, json={"name": "default", "labels": {}}).status_code == 200


def test_a_user_being_deleted_cannot_become_a_member(setup: Setup) -> None:
    for number in range(8):
        user = post(setup.admin, "/v1/users", name=f"short-{number}")["id"]
        member = f"/v1/projects/{setup.b.id}/members/{user}"

        def act(which: int, user: str = user, member: str = member) -> httpx.Response:
            if which == 0:
                return setup.admin.delete(f"/v1/users/{user}")
            return setup.admin.put(member, json={"role": "member"})

        deleted, added = run_concurrently(2, act)
        assert (deleted.status_code, added.status_code) in {(204, 200), (204, 404)}
        members = setup.admin.items(f"/v1/projects/{setup.b.id}/members", limit=200)
        assert user not in {item["user_id"] for item in members}


@pytest.mark.parametrize(
    ("path", "field", "value", "code"),
    [
        ("/v1/projects", "name", "raced", "name_taken"),
        ("/v1/users", "email", "raced@x.example", "email_taken"),
    ],
)
def test_one_of_many_concurrent_creates_gets_a_unique_name(
    setup: Setup, path: str, field: str, value: str, code: str
) -> None:
    body = {"name": "raced", field: value}
    answers = run_concurrently(6, lambda _: setup.admin.post(path, json=body))
    rejected = [answer for answer in answers if answer.status_code != 201]
    assert len(rejected) == 5
    for answer in rejected:
        problem(answer, 409, code)


@pytest.mark.parametrize("path", ["/v1/instances", "/v1/api-keys", "/v1/secrets"])
def test_nothing_remains_in_a_project_deleted_during_a_create(setup: Setup, path: str) -> None:
    """A create that comes second gets 404. After one that comes first, an instance prevents the delete; keys
    and secrets are deleted with the project.
    """
    bodies: dict[str, Any] = {
        "/v1/instances": {"image": IMAGE, "node_selector": NOWHERE},
        "/v1/api-keys": {"name": "k", "role": "viewer"},
        "/v1/secrets": {"name": "token", "value": "x"},
    }
    for number in range(8):
        project = post(setup.admin, "/v1/projects", name=f"short-{path[4:7]}-{number}")["id"]
        body = {**bodies[path], "project_id": project}

        def act(which: int, project: str = project, body: dict[str, Any] = body) -> httpx.Response:
            if which == 0:
                return setup.admin.delete(f"/v1/projects/{project}")
            return setup.admin.post(path, json=body)

        deleted, made = run_concurrently(2, act)
        outcome = (deleted.status_code, made.status_code)
        left = setup.admin.items(path, project_id=project)
        if path == "/v1/instances":
            assert outcome in {(204, 404), (409, 201)}, (deleted.text, made.text)
            assert len(left) == (1 if made.status_code == 201 else 0)
        else:
            assert outcome in {(204, 404), (204, 201)}, (deleted.text, made.text)
            assert left == []


def test_an_instance_deleted_while_it_starts_leaves_no_allocation(setup: Setup) -> None:
    selector = {"sandbox": "working"}
    for _ in range(5):
        made = setup.a.member.create(node_selector=selector, gpus={"count": 1})["id"]
        path = f"/v1/instances/{made}"
        answers = run_concurrently(4, lambda _number, path=path: setup.a.member.delete(path))  # type: ignore[misc]
        assert {answer.status_code for answer in answers} <= {202, 404}
        wait_until(lambda path=path: setup.a.member.get(path).status_code == 404)  # type: ignore[misc]
    held = {gpu["instance_id"] for gpu in setup.admin.items("/v1/gpus", node_id=setup.working.id)}
    assert held == {None, setup.running}
