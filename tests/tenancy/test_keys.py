"""The life of API keys: creation, visibility, expiry and revocation."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.tenants import api_keys
from mooring.db.tables import ApiKey, IdempotencyKey, JoinToken
from mooring_client.errors import Unauthorized
from mooring_client.schemas.projects import Role
from tests.problems import problem
from tests.service import Client, running, settings_for
from tests.tenancy.tenants import Setup, make_key, post

# The time within which every replica rejects a key that was revoked or has expired.
REJECTED_WITHIN_S = 1.0


def test_a_key_is_shown_once_and_identified_by_its_prefix(setup: Setup) -> None:
    made = make_key(setup.a.owner, name="ci", role="viewer", scopes=["instances:read"])
    assert made["key"].startswith(made["prefix"])
    assert len(made["prefix"]) < len(made["key"]) / 3
    path = f"/v1/api-keys/{made['id']}"
    shown = setup.a.owner.get(path)
    assert shown.json() == {name: value for name, value in made.items() if name != "key"}
    for answer in (shown, setup.a.owner.get("/v1/api-keys"), setup.a.owner.get("/v1/audit-log")):
        assert made["key"] not in answer.text
    with setup.service.plane.database.read() as session:
        row = session.get_one(ApiKey, made["id"])
        stored = [str(value) for value in vars(row).values()]
    assert [value for value in stored if made["key"][9:] in value] == []


def test_the_last_use_of_a_key_is_recorded(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="viewer")
    assert made["last_used_at"] is None
    with Client(setup.service.url, key=made["key"]) as client:
        client.get("/v1/instances")
        used = datetime.fromisoformat(client.get("/v1/me").json()["key"]["last_used_at"])
    assert abs(datetime.now(UTC) - used) < timedelta(seconds=30)


@pytest.mark.parametrize(
    "expires_at",
    ["2020-01-01T00:00:00Z", "2030-01-01T00:00:00", "tomorrow", 1_900_000_000, "9999-12-31T23:59:59-12:00",
     "0001-01-01T00:00:00+12:00", "2030-13-01T00:00:00Z"],
)  # fmt: skip
def test_an_invalid_or_past_expiry_is_rejected(setup: Setup, expires_at: Any) -> None:
    body = {"name": "k", "role": "viewer", "expires_at": expires_at}
    problem(setup.a.owner.post("/v1/api-keys", json=body), 422)


def test_an_expiry_with_a_utc_offset_is_shown_in_utc(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="viewer", expires_at="2030-01-01T05:30:00.1239+05:30")
    assert made["expires_at"] == "2030-01-01T00:00:00.123Z"
    assert setup.a.owner.get(f"/v1/api-keys/{made['id']}").json()["expires_at"] == made["expires_at"]


def test_a_key_in_use_is_rejected_within_a_second_after_its_expiry(setup: Setup) -> None:
    """Constant use keeps the key in the cache when it expires."""
    lifetime_s = 4.0
    expires_at = datetime.now(UTC) + timedelta(seconds=lifetime_s)
    expired = time.monotonic() + lifetime_s
    made = make_key(setup.a.owner, role="viewer", expires_at=expires_at.isoformat())
    with Client(setup.service.url, key=made["key"]) as client:
        assert client.get("/v1/me").status_code == 200
        assert _last_accepted_at(client, lifetime_s + 3 * REJECTED_WITHIN_S) <= expired + REJECTED_WITHIN_S


def test_unknown_and_revoked_keys_get_the_same_answer(setup: Setup) -> None:
    revoked = make_key(setup.a.owner, role="viewer")
    setup.a.owner.delete(f"/v1/api-keys/{revoked['id']}")
    documents = []
    for key in (revoked["key"], "mk_unknown-0123456789-0123456789", "x", "mn_unknown"):
        with Client(setup.service.url, key=key) as client:
            document = problem(client.get("/v1/me"), 401, "unauthorized")
            del document["request_id"]
            documents.append(document)
    assert all(document == documents[0] for document in documents)


def test_owners_see_all_keys_of_the_project_and_others_their_own(setup: Setup) -> None:
    service_key, people = setup.a.service["id"], setup.a.people
    personal = {role: person.key["id"] for role, person in people.items()}
    visible = {
        role: {item["id"] for item in person.client.items("/v1/api-keys", limit=200)}
        for role, person in people.items()
    }
    assert visible[Role.OWNER] >= {service_key, *personal.values()}
    for role in (Role.VIEWER, Role.MEMBER):
        assert visible[role] & {service_key, *personal.values()} == {personal[role]}
        for other in (service_key, personal[Role.OWNER]):
            problem(people[role].client.get(f"/v1/api-keys/{other}"), 404, "not_found")
            problem(people[role].client.delete(f"/v1/api-keys/{other}"), 404, "not_found")
    with Client(setup.service.url, key=setup.a.service["key"]) as client:
        assert [item["id"] for item in client.items("/v1/api-keys")] == [service_key]
    of_member = setup.a.owner.items("/v1/api-keys", user_id=people[Role.MEMBER].id)
    assert personal[Role.MEMBER] in {item["id"] for item in of_member}


def test_a_key_for_another_user_does_not_show_their_keys_in_other_projects(setup: Setup) -> None:
    """An owner adds a user of another project, and uses a key made for them to look for their other keys."""
    victim = setup.b.people[Role.MEMBER]
    path = f"/v1/projects/{setup.a.id}/members/{victim.id}"
    assert setup.a.owner.put(path, json={"role": "viewer"}).status_code == 200
    made = make_key(setup.a.owner, user_id=victim.id, role="viewer")
    with Client(setup.service.url, key=made["key"]) as client:
        assert [item["id"] for item in client.items("/v1/api-keys")] == [made["id"]]
        assert client.items("/v1/api-keys", project_id=setup.b.id) == []
        for method in ("GET", "DELETE"):
            problem(client.request(method, f"/v1/api-keys/{victim.key['id']}"), 404, "not_found")
    assert victim.key["id"] in {item["id"] for item in victim.client.items("/v1/api-keys")}
    assert setup.a.owner.delete(path).status_code == 204


def test_only_admins_create_keys_for_an_admin_who_is_no_member(setup: Setup) -> None:
    admin_user = post(setup.admin, "/v1/users", name="Boss", is_admin=True)["id"]
    body = {"name": "k", "user_id": admin_user, "role": "owner", "project_id": setup.a.id}
    problem(setup.a.owner.post("/v1/api-keys", json=body), 404, "not_found")
    assert make_key(setup.admin, **body)["user_id"] == admin_user


def test_a_revoked_key_is_gone_from_the_list(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="viewer")
    path = f"/v1/api-keys/{made['id']}"
    assert setup.a.owner.delete(path).status_code == 204
    for answer in (setup.a.owner.get(path), setup.a.owner.delete(path)):
        problem(answer, 404, "not_found")
    assert made["id"] not in {item["id"] for item in setup.a.owner.items("/v1/api-keys", limit=200)}


def test_me_shows_the_user_and_the_project_of_the_key(setup: Setup) -> None:
    for role, person in setup.a.people.items():
        me = person.client.get("/v1/me").json()
        assert (me["kind"], me["user"]["id"], me["key"]["id"]) == ("key", person.id, person.key["id"])
        assert (me["project"]["id"], me["role"], me["is_admin"]) == (setup.a.id, role, False)
        assert [project["id"] for project in me["projects"]] == [setup.a.id]
    admin = setup.admin.get("/v1/me").json()
    assert (admin["is_admin"], admin["project"], admin["user"]) == (True, None, None)


@pytest.mark.parametrize("scope", ["instances:write", "instances:exec", "usage:read", "metrics:read"])
def test_a_key_with_a_single_scope_may_call_me(setup: Setup, scope: str) -> None:
    key = make_key(setup.admin, scopes=[scope])
    with Client(setup.service.url, key=key["key"]) as client:
        me = client.get("/v1/me").json()
        assert (me["key"]["id"], me["scopes"], me["is_admin"]) == (key["id"], [scope], False)


def test_a_key_created_without_a_project_belongs_to_that_of_its_creator(setup: Setup) -> None:
    assert make_key(setup.a.owner, role="viewer")["project_id"] == setup.a.id
    # The admin's own key belongs to no project.
    default = setup.service.plane.identity.default_project_id
    assert make_key(setup.admin, role="viewer")["project_id"] == default
    assert make_key(setup.admin, scopes=["admin"])["project_id"] is None


@pytest.mark.parametrize("permissions", [{}, {"role": None}, {"scopes": []}])
def test_a_key_without_permissions_is_rejected(setup: Setup, permissions: dict[str, Any]) -> None:
    body = {"name": "k", **permissions}
    problem(setup.a.owner.post("/v1/api-keys", json=body), 422, "no_permissions")


def _stored_answer(setup: Setup, key: str) -> IdempotencyKey:
    with setup.service.plane.database.read() as session:
        return session.scalars(select(IdempotencyKey).where(IdempotencyKey.key == key)).one()


@pytest.mark.parametrize(
    ("path", "body", "secret_field"),
    [("/v1/api-keys", {"name": "k", "role": "viewer"}, "key"), ("/v1/join-tokens", {"ttl_s": 60}, "token")],
)
def test_a_repeat_returns_the_secret_which_is_stored_encrypted(
    setup: Setup, path: str, body: dict[str, Any], secret_field: str
) -> None:
    headers = {"Idempotency-Key": f"once-{secret_field}"}
    first, again = (setup.admin.post(path, json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers.get("location") == first.headers.get("location")
    secret = first.json()[secret_field]
    row = _stored_answer(setup, headers["Idempotency-Key"])
    assert row.sealed
    assert row.body
    for part in (secret, secret[3:], secret[-16:]):
        assert part.encode() not in row.body
        assert part not in str(row.headers) + row.fingerprint
    # An answer without a secret is stored unencrypted.
    plain_headers = {"Idempotency-Key": f"plain-{secret_field}"}
    plain = setup.admin.post("/v1/users", json={"name": "n"}, headers=plain_headers)
    assert _stored_answer(setup, plain_headers["Idempotency-Key"]).body == plain.content


def test_join_tokens_are_stored_as_hashes(setup: Setup) -> None:
    made = post(setup.admin, "/v1/join-tokens", ttl_s=60)
    with setup.service.plane.database.read() as session:
        row = session.get_one(JoinToken, made["id"])
        assert made["token"] not in str(vars(row))


def test_a_found_row_with_another_hash_is_rejected(setup: Setup) -> None:
    """The hash is compared again in constant time, so the index lookup alone does not authenticate."""
    key = make_key(setup.a.owner, name="ci", role="viewer")

    class WrongRowSession(Session):
        def scalar(self, *_args: Any, **_options: Any) -> Any:
            return self.get_one(ApiKey, key["id"])

    with WrongRowSession(setup.service.plane.database.engine) as session, pytest.raises(Unauthorized):
        api_keys.identify(session, "mk_another-key")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("deleted", ["key", "membership"])
def test_a_revoked_key_is_rejected_by_other_replicas_within_a_second(
    database_url: str, tmp_path: Path, deleted: str
) -> None:
    here_settings, there_settings = (
        settings_for(database_url, tmp_path / name, rate_limits="off") for name in ("here", "there")
    )
    with running(here_settings) as here, here.client as admin:
        (tmp_path / "there").mkdir()
        for name in ("encryption.key", "audit.key"):
            (tmp_path / "there" / name).write_bytes((tmp_path / "here" / name).read_bytes())
        user = post(admin, "/v1/users", name="ada")["id"]
        project = post(admin, "/v1/projects", name="p")["id"]
        membership = f"/v1/projects/{project}/members/{user}"
        assert admin.put(membership, json={"role": "member"}).status_code == 200
        key = make_key(admin, project_id=project, user_id=user, role="member")
        path = membership if deleted == "membership" else f"/v1/api-keys/{key['id']}"
        with running(there_settings) as there, Client(there.url, key=key["key"]) as client:
            assert client.get("/v1/me").status_code == 200  # cached there just before the deletion
            assert admin.delete(path).status_code == 204
            deleted_at = time.monotonic()
            assert _last_accepted_at(client, 3 * REJECTED_WITHIN_S) <= deleted_at + REJECTED_WITHIN_S
            with Client(here.url, key=key["key"]) as client_here:
                problem(client_here.get("/v1/me"), 401, "unauthorized")


def _last_accepted_at(client: Client, timeout_s: float) -> float:
    """Use a key until it is rejected. Return when the last accepted request was sent (monotonic clock)."""
    accepted_at = time.monotonic()
    deadline = accepted_at + timeout_s
    while (sent_at := time.monotonic()) < deadline:
        if client.get("/v1/me").status_code == 401:
            return accepted_at
        accepted_at = sent_at
    raise AssertionError(f"the key is still accepted after {timeout_s:g} s")
