"""The life of API keys: creation, visibility, expiry and revocation."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.tenants import api_keys
from mooring.core.access import Role
from mooring.core.errors import Unauthorized
from mooring.db.tables import ApiKey, IdempotencyKey, JoinToken
from tests.problems import problem
from tests.service import Client, running, settings_for
from tests.tenancy.tenants import Setup, make_key, post
from tests.testbed.waiting import wait_until

SEEN_WITHIN_S = 1.0


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


def test_an_expiry_of_another_zone_is_shown_in_utc(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="viewer", expires_at="2030-01-01T05:30:00.1239+05:30")
    assert made["expires_at"] == "2030-01-01T00:00:00.123Z"
    assert setup.a.owner.get(f"/v1/api-keys/{made['id']}").json()["expires_at"] == made["expires_at"]


def test_an_expired_key_is_rejected_even_if_cached(setup: Setup) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=2)
    made = make_key(setup.a.owner, role="viewer", expires_at=soon.isoformat(timespec="milliseconds"))
    assert datetime.fromisoformat(made["expires_at"]) == soon.replace(
        microsecond=soon.microsecond // 1000 * 1000
    )
    with Client(setup.service.url, key=made["key"]) as client:
        assert client.get("/v1/me").status_code == 200  # cached as late as possible
        wait_until(lambda: datetime.now(UTC) > soon + timedelta(seconds=SEEN_WITHIN_S))
        problem(client.get("/v1/me"), 401, "unauthorized")


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
    service, people = setup.a.service["id"], setup.a.people
    personal = {role: person.key["id"] for role, person in people.items()}
    visible = {
        role: {item["id"] for item in person.client.items("/v1/api-keys", limit=200)}
        for role, person in people.items()
    }
    assert visible[Role.OWNER] >= {service, *personal.values()}
    for role in (Role.VIEWER, Role.MEMBER):
        assert visible[role] & {service, *personal.values()} == {personal[role]}
        for other in (service, personal[Role.OWNER]):
            problem(people[role].client.get(f"/v1/api-keys/{other}"), 404, "not_found")
            problem(people[role].client.delete(f"/v1/api-keys/{other}"), 404, "not_found")
    with Client(setup.service.url, key=setup.a.service["key"]) as client:
        assert [item["id"] for item in client.items("/v1/api-keys")] == [service]
    mine = {"user_id": people[Role.MEMBER].id}
    assert personal[Role.MEMBER] in {item["id"] for item in setup.a.owner.items("/v1/api-keys", **mine)}


def test_a_key_for_another_user_does_not_show_their_keys_in_other_projects(setup: Setup) -> None:
    """An owner adds another user, creates a key for them and tries to list their other keys with it."""
    victim = setup.b.people[Role.MEMBER]
    path = f"/v1/projects/{setup.a.id}/members/{victim.id}"
    assert setup.a.owner.put(path, json={"role": "viewer"}).status_code == 200
    made = make_key(setup.a.owner, user_id=victim.id, role="viewer")
    with Client(setup.service.url, key=made["key"]) as disguised:
        assert [item["id"] for item in disguised.items("/v1/api-keys")] == [made["id"]]
        assert disguised.items("/v1/api-keys", project_id=setup.b.id) == []
        for method in ("GET", "DELETE"):
            problem(disguised.request(method, f"/v1/api-keys/{victim.key['id']}"), 404, "not_found")
    assert victim.key["id"] in {item["id"] for item in victim.client.items("/v1/api-keys")}
    assert setup.a.owner.delete(path).status_code == 204


def test_only_admins_create_keys_for_an_admin_who_is_no_member(setup: Setup) -> None:
    boss = post(setup.admin, "/v1/users", name="Boss", is_admin=True)["id"]
    body = {"name": "k", "user_id": boss, "role": "owner", "project_id": setup.a.id}
    problem(setup.a.owner.post("/v1/api-keys", json=body), 404, "not_found")
    assert make_key(setup.admin, **body)["user_id"] == boss


def test_a_revoked_key_is_gone_from_the_list(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="viewer")
    path = f"/v1/api-keys/{made['id']}"
    assert setup.a.owner.delete(path).status_code == 204
    for answer in (setup.a.owner.get(path), setup.a.owner.delete(path)):
        problem(answer, 404, "not_found")
    assert made["id"] not in {item["id"] for item in setup.a.owner.items("/v1/api-keys", limit=200)}


def test_me_shows_the_keys_user_and_project(setup: Setup) -> None:
    for role, person in setup.a.people.items():
        me = person.client.get("/v1/me").json()
        assert (me["kind"], me["user"]["id"], me["key"]["id"]) == ("key", person.id, person.key["id"])
        assert (me["project"]["id"], me["role"], me["is_admin"]) == (setup.a.id, role, False)
        assert [project["id"] for project in me["projects"]] == [setup.a.id]
    admin = setup.admin.get("/v1/me").json()
    assert (admin["is_admin"], admin["project"], admin["user"]) == (True, None, None)


@pytest.mark.parametrize("scope", ["instances:write", "instances:exec", "usage:read", "metrics:read"])
def test_a_key_with_any_scope_may_call_me(setup: Setup, scope: str) -> None:
    key = make_key(setup.admin, scopes=[scope])
    with Client(setup.service.url, key=key["key"]) as client:
        me = client.get("/v1/me").json()
        assert (me["key"]["id"], me["scopes"], me["is_admin"]) == (key["id"], [scope], False)


def test_a_new_key_belongs_to_its_creators_project_by_default(setup: Setup) -> None:
    assert make_key(setup.a.owner, role="viewer")["project_id"] == setup.a.id
    default = setup.service.plane.identity.default_project_id
    assert make_key(setup.admin, role="viewer")["project_id"] == default
    assert make_key(setup.admin, scopes=["admin"])["project_id"] is None
    for nothing in ('{"name": "k"}', '{"name": "k", "role": null}', '{"name": "k", "scopes": []}'):
        headers = {"Content-Type": "application/json"}
        problem(setup.a.owner.post("/v1/api-keys", content=nothing, headers=headers), 422, "no_permissions")


def _stored_answer(setup: Setup, key: str) -> IdempotencyKey:
    with setup.service.plane.database.read() as session:
        return session.scalars(select(IdempotencyKey).where(IdempotencyKey.key == key)).one()


@pytest.mark.parametrize(
    ("path", "body", "shown_as"),
    [("/v1/api-keys", {"name": "k", "role": "viewer"}, "key"), ("/v1/join-tokens", {"ttl_s": 60}, "token")],
)
def test_a_repeat_returns_the_secret_which_is_stored_encrypted(
    setup: Setup, path: str, body: dict[str, Any], shown_as: str
) -> None:
    headers = {"Idempotency-Key": f"once-{shown_as}"}
    first, again = (setup.admin.post(path, json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers.get("location") == first.headers.get("location")
    secret = first.json()[shown_as]
    row = _stored_answer(setup, headers["Idempotency-Key"])
    assert row.sealed
    assert row.body
    for part in (secret, secret[3:], secret[-16:]):
        assert part.encode() not in row.body
        assert part not in str(row.headers) + row.fingerprint
    # An answer without a secret is stored as it was sent.
    post_headers = {"Idempotency-Key": f"plain-{shown_as}"}
    plain = setup.admin.post("/v1/users", json={"name": "n"}, headers=post_headers)
    assert _stored_answer(setup, post_headers["Idempotency-Key"]).body == plain.content


def test_join_tokens_are_stored_as_hashes(setup: Setup) -> None:
    made = post(setup.admin, "/v1/join-tokens", ttl_s=60)
    with setup.service.plane.database.read() as session:
        row = session.get_one(JoinToken, made["id"])
        assert made["token"] not in str(vars(row))


def test_a_found_row_with_another_hash_is_rejected(setup: Setup) -> None:
    """The hash is compared again in constant time, so the index lookup alone does not authenticate."""
    key = make_key(setup.a.owner, name="ci", role="viewer")

    class WrongRow(Session):
        def scalar(self, *_args: Any, **_options: Any) -> Any:
            return self.get_one(ApiKey, key["id"])

    with WrongRow(setup.service.plane.database.engine) as session, pytest.raises(Unauthorized):
        api_keys.identify(session, "mk_another-key")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("way", ["revoked", "membership"])
def test_a_revoked_key_is_rejected_by_other_replicas_within_a_second(
    database_url: str, tmp_path: Path, way: str
) -> None:
    settings = [settings_for(database_url, tmp_path / name, rate_limits="off") for name in ("here", "there")]
    (tmp_path / "there").mkdir()
    with running(settings[0]) as here, here.client as admin:
        for name in ("encryption.key", "audit.key"):
            (tmp_path / "there" / name).write_bytes((tmp_path / "here" / name).read_bytes())
        user = post(admin, "/v1/users", name="ada")["id"]
        project = post(admin, "/v1/projects", name="p")["id"]
        member = f"/v1/projects/{project}/members/{user}"
        assert admin.put(member, json={"role": "member"}).status_code == 200
        key = make_key(admin, project_id=project, user_id=user, role="member")
        with running(settings[1]) as there:
            assert (
                _accepted_for_s(there.url, key["key"], lambda: _revoke(admin, way, key["id"], member))
                <= SEEN_WITHIN_S
            )
            with Client(here.url, key=key["key"]) as caller:
                problem(caller.get("/v1/me"), 401, "unauthorized")


def _revoke(admin: Client, way: str, key_id: str, member: str) -> httpx.Response:
    return admin.delete(member if way == "membership" else f"/v1/api-keys/{key_id}")


def _accepted_for_s(url: str, key: str, end: Any) -> float:
    """For how long a replica that has cached the key accepts it after its revocation, in seconds."""
    with Client(url, key=key) as caller:
        assert caller.get("/v1/me").status_code == 200  # cached there as late as possible
        assert end().status_code == 204
        ended = time.monotonic()
        let_in = ended
        while (asked := time.monotonic()) - ended < 3 * SEEN_WITHIN_S:
            if caller.get("/v1/me").status_code == 401:
                return let_in - ended
            let_in = asked
        raise AssertionError("it is still let in")
