"""API keys over their life: shown once, told apart, found by those they concern, ended everywhere at once."""

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
from tests.tenancy.tenants import World, make_key, post
from tests.testbed.waiting import wait_until

SEEN_WITHIN_S = 1.0


def test_a_key_is_shown_once_and_told_by_its_prefix(world: World) -> None:
    made = make_key(world.a.owner, name="ci", role="viewer", scopes=["instances:read"])
    assert made["key"].startswith(made["prefix"])
    assert len(made["prefix"]) < len(made["key"]) / 3
    path = f"/v1/api-keys/{made['id']}"
    shown = world.a.owner.get(path)
    assert shown.json() == {name: value for name, value in made.items() if name != "key"}
    for answer in (shown, world.a.owner.get("/v1/api-keys"), world.a.owner.get("/v1/audit-log")):
        assert made["key"] not in answer.text
    with world.service.plane.database.read() as session:
        row = session.get_one(ApiKey, made["id"])
        kept = [str(value) for value in vars(row).values()]
    assert [value for value in kept if made["key"][9:] in value] == []


def test_its_use_is_noted(world: World) -> None:
    made = make_key(world.a.owner, role="viewer")
    assert made["last_used_at"] is None
    with Client(world.service.url, key=made["key"]) as client:
        client.get("/v1/instances")
        used = datetime.fromisoformat(client.get("/v1/me").json()["key"]["last_used_at"])
    assert abs(datetime.now(UTC) - used) < timedelta(seconds=30)


@pytest.mark.parametrize(
    "expires_at",
    ["2020-01-01T00:00:00Z", "2030-01-01T00:00:00", "tomorrow", 1_900_000_000, "9999-12-31T23:59:59-12:00",
     "0001-01-01T00:00:00+12:00", "2030-13-01T00:00:00Z"],
)  # fmt: skip
def test_an_expiry_is_a_moment_to_come(world: World, expires_at: Any) -> None:
    body = {"name": "k", "role": "viewer", "expires_at": expires_at}
    problem(world.a.owner.post("/v1/api-keys", json=body), 422)


def test_an_expiry_of_another_zone_is_shown_in_utc(world: World) -> None:
    made = make_key(world.a.owner, role="viewer", expires_at="2030-01-01T05:30:00.1239+05:30")
    assert made["expires_at"] == "2030-01-01T00:00:00.123Z"
    assert world.a.owner.get(f"/v1/api-keys/{made['id']}").json()["expires_at"] == made["expires_at"]


def test_an_expired_key_is_refused_and_a_good_one_says_until_when(world: World) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=2)
    made = make_key(world.a.owner, role="viewer", expires_at=soon.isoformat(timespec="milliseconds"))
    assert datetime.fromisoformat(made["expires_at"]) == soon.replace(
        microsecond=soon.microsecond // 1000 * 1000
    )
    with Client(world.service.url, key=made["key"]) as client:
        assert client.get("/v1/me").status_code == 200  # remembered, as late as can be
        wait_until(lambda: datetime.now(UTC) > soon + timedelta(seconds=SEEN_WITHIN_S))
        problem(client.get("/v1/me"), 401, "unauthorized")


def test_unknown_revoked_and_expired_are_told_in_the_same_words(world: World) -> None:
    revoked = make_key(world.a.owner, role="viewer")
    world.a.owner.delete(f"/v1/api-keys/{revoked['id']}")
    told = []
    for key in (revoked["key"], "mk_unknown-0123456789-0123456789", "x", "mn_unknown"):
        with Client(world.service.url, key=key) as client:
            document = problem(client.get("/v1/me"), 401, "unauthorized")
            del document["request_id"]
            told.append(document)
    assert all(document == told[0] for document in told)


def test_owners_see_all_keys_of_the_project_and_others_their_own(world: World) -> None:
    service, people = world.a.service["id"], world.a.people
    personal = {role: person.key["id"] for role, person in people.items()}
    seen = {
        role: {item["id"] for item in person.client.items("/v1/api-keys", limit=200)}
        for role, person in people.items()
    }
    assert seen[Role.OWNER] >= {service, *personal.values()}
    for role in (Role.VIEWER, Role.MEMBER):
        assert seen[role] & {service, *personal.values()} == {personal[role]}
        for other in (service, personal[Role.OWNER]):
            problem(people[role].client.get(f"/v1/api-keys/{other}"), 404, "not_found")
            problem(people[role].client.delete(f"/v1/api-keys/{other}"), 404, "not_found")
    with Client(world.service.url, key=world.a.service["key"]) as client:
        assert [item["id"] for item in client.items("/v1/api-keys")] == [service]
    mine = {"user_id": people[Role.MEMBER].id}
    assert personal[Role.MEMBER] in {item["id"] for item in world.a.owner.items("/v1/api-keys", **mine)}


def test_a_key_made_for_somebody_tells_nothing_of_their_keys_elsewhere(world: World) -> None:
    """An owner takes a stranger in, makes a key in their name, and asks with it what else they have."""
    victim = world.b.people[Role.MEMBER]
    path = f"/v1/projects/{world.a.id}/members/{victim.id}"
    assert world.a.owner.put(path, json={"role": "viewer"}).status_code == 200
    made = make_key(world.a.owner, user_id=victim.id, role="viewer")
    with Client(world.service.url, key=made["key"]) as disguised:
        assert [item["id"] for item in disguised.items("/v1/api-keys")] == [made["id"]]
        assert disguised.items("/v1/api-keys", project_id=world.b.id) == []
        for method in ("GET", "DELETE"):
            problem(disguised.request(method, f"/v1/api-keys/{victim.key['id']}"), 404, "not_found")
    assert victim.key["id"] in {item["id"] for item in victim.client.items("/v1/api-keys")}
    assert world.a.owner.delete(path).status_code == 204


def test_only_admins_make_keys_in_the_name_of_an_admin_who_is_no_member(world: World) -> None:
    boss = post(world.admin, "/v1/users", name="Boss", is_admin=True)["id"]
    body = {"name": "k", "user_id": boss, "role": "owner", "project_id": world.a.id}
    problem(world.a.owner.post("/v1/api-keys", json=body), 404, "not_found")
    assert make_key(world.admin, **body)["user_id"] == boss


def test_a_revoked_key_is_gone_from_the_list(world: World) -> None:
    made = make_key(world.a.owner, role="viewer")
    path = f"/v1/api-keys/{made['id']}"
    assert world.a.owner.delete(path).status_code == 204
    for answer in (world.a.owner.get(path), world.a.owner.delete(path)):
        problem(answer, 404, "not_found")
    assert made["id"] not in {item["id"] for item in world.a.owner.items("/v1/api-keys", limit=200)}


def test_me_says_who_the_key_is(world: World) -> None:
    for role, person in world.a.people.items():
        me = person.client.get("/v1/me").json()
        assert (me["kind"], me["user"]["id"], me["key"]["id"]) == ("key", person.id, person.key["id"])
        assert (me["project"]["id"], me["role"], me["is_admin"]) == (world.a.id, role, False)
        assert [project["id"] for project in me["projects"]] == [world.a.id]
    admin = world.admin.get("/v1/me").json()
    assert (admin["is_admin"], admin["project"], admin["user"]) == (True, None, None)


@pytest.mark.parametrize("scope", ["instances:write", "instances:exec", "usage:read", "metrics:read"])
def test_whatever_a_key_may_do_it_may_ask_who_it_is(world: World, scope: str) -> None:
    key = make_key(world.admin, scopes=[scope])
    with Client(world.service.url, key=key["key"]) as client:
        me = client.get("/v1/me").json()
        assert (me["key"]["id"], me["scopes"], me["is_admin"]) == (key["id"], [scope], False)


def test_without_a_project_named_a_key_is_of_its_makers_own(world: World) -> None:
    assert make_key(world.a.owner, role="viewer")["project_id"] == world.a.id
    default = world.service.plane.identity.default_project_id
    assert make_key(world.admin, role="viewer")["project_id"] == default
    assert make_key(world.admin, scopes=["admin"])["project_id"] is None
    for nothing in ('{"name": "k"}', '{"name": "k", "role": null}', '{"name": "k", "scopes": []}'):
        headers = {"Content-Type": "application/json"}
        problem(world.a.owner.post("/v1/api-keys", content=nothing, headers=headers), 422, "no_permissions")


def _kept(world: World, key: str) -> IdempotencyKey:
    with world.service.plane.database.read() as session:
        return session.scalars(select(IdempotencyKey).where(IdempotencyKey.key == key)).one()


@pytest.mark.parametrize(
    ("path", "body", "shown_as"),
    [("/v1/api-keys", {"name": "k", "role": "viewer"}, "key"), ("/v1/join-tokens", {"ttl_s": 60}, "token")],
)
def test_a_repeat_shows_the_secret_again_and_the_database_does_not(
    world: World, path: str, body: dict[str, Any], shown_as: str
) -> None:
    headers = {"Idempotency-Key": f"once-{shown_as}"}
    first, again = (world.admin.post(path, json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers.get("location") == first.headers.get("location")
    secret = first.json()[shown_as]
    row = _kept(world, headers["Idempotency-Key"])
    assert row.sealed
    assert row.body
    for part in (secret, secret[3:], secret[-16:]):
        assert part.encode() not in row.body
        assert part not in str(row.headers) + row.fingerprint
    # What shows no secret is kept as it went out.
    post_headers = {"Idempotency-Key": f"plain-{shown_as}"}
    plain = world.admin.post("/v1/users", json={"name": "n"}, headers=post_headers)
    assert _kept(world, post_headers["Idempotency-Key"]).body == plain.content


def test_join_tokens_are_kept_as_hashes(world: World) -> None:
    made = post(world.admin, "/v1/join-tokens", ttl_s=60)
    with world.service.plane.database.read() as session:
        row = session.get_one(JoinToken, made["id"])
        assert made["token"] not in str(vars(row))


def test_a_row_of_another_key_that_the_database_finds_is_refused(world: World) -> None:
    """The hash of the key is compared again, in constant time: the index alone does not let a caller in."""
    key = make_key(world.a.owner, name="ci", role="viewer")

    class WrongRow(Session):
        def scalar(self, *_args: Any, **_options: Any) -> Any:
            return self.get_one(ApiKey, key["id"])

    with WrongRow(world.service.plane.database.engine) as session, pytest.raises(Unauthorized):
        api_keys.identify(session, "mk_another-key")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("way", ["revoked", "membership"])
def test_the_end_of_a_key_is_seen_by_another_replica_within_a_second(
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
                _seen_after_s(there.url, key["key"], lambda: _end(admin, way, key["id"], member))
                <= SEEN_WITHIN_S
            )
            with Client(here.url, key=key["key"]) as caller:
                problem(caller.get("/v1/me"), 401, "unauthorized")


def _end(admin: Client, way: str, key_id: str, member: str) -> httpx.Response:
    return admin.delete(member if way == "membership" else f"/v1/api-keys/{key_id}")


def _seen_after_s(url: str, key: str, end: Any) -> float:
    """How long after the end of a key a replica that knows it well still let it in."""
    with Client(url, key=key) as caller:
        assert caller.get("/v1/me").status_code == 200  # remembered there, as late as can be
        assert end().status_code == 204
        ended = time.monotonic()
        let_in = ended
        while (asked := time.monotonic()) - ended < 3 * SEEN_WITHIN_S:
            if caller.get("/v1/me").status_code == 401:
                return let_in - ended
            let_in = asked
        raise AssertionError("it is still let in")
