"""Users of single sign-on, and their roles from memberships and claims."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.sso.conftest import new_project
from tests.sso.provider import Provider
from tests.sso.token_requests import get_with_token, me, status
from tests.testbed.waiting import wait_until

# For tests that do not depend on the database.
on_one_database = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def roles(service: RunningService, token: str) -> dict[str, str]:
    """The user's role in each project, by the project's name."""
    return {project["name"]: project["role"] for project in me(service, token)["projects"]}


def sso_users(client: Client) -> list[dict[str, Any]]:
    return [user for user in client.items("/v1/users") if user["sso"]]


def test_a_token_authenticates_its_user(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    claims = {
        "groups": ["members", "not-in-the-settings"],
        "name": "Ada Lovelace",
        "email": "ada@example.com",
    }
    shown = me(service, provider.token(claims=claims))
    assert (shown["kind"], shown["key"], shown["is_admin"]) == ("user", None, False)
    assert shown["projects"] == [
        {
            "id": vision,
            "name": "vision",
            "role": "member",
            "scopes": ["instances:exec", "instances:read", "instances:write", "usage:read"],
        }
    ]
    (user,) = sso_users(client)
    assert shown["user"] == user
    assert (user["name"], user["email"], user["sso"]) == ("Ada Lovelace", "ada@example.com", True)


def test_eight_concurrent_first_requests_create_one_user(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    tokens = [provider.token(claims={"groups": ["viewers"], "email": "ada@example.com"}) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        shown = list(pool.map(lambda token: me(service, token)["user"]["id"], tokens))
    (user,) = sso_users(client)
    assert set(shown) == {user["id"]}
    (entry,) = [entry for entry in client.items("/v1/audit-log") if entry["action"] == "user.create"]
    assert (entry["actor"]["kind"], entry["actor"]["id"]) == ("user", user["id"])
    assert (entry["target_id"], entry["address"]) == (user["id"], "127.0.0.1")
    assert entry["after"]["issuer"] == provider.issuer


@on_one_database
def test_actions_of_an_sso_user_are_audited_with_the_user(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    with Client(service.url, provider.token(claims={"groups": ["members"]})) as ada:
        made = ada.create()
        user_id = ada.get("/v1/me").json()["user"]["id"]
    assert made["project_id"] == vision
    entry = client.items("/v1/audit-log")[0]
    assert (entry["action"], entry["actor"]["kind"]) == ("instance.create", "user")
    assert entry["actor"]["user_id"] == user_id


def test_the_higher_role_of_claim_and_membership_applies(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    user_id = me(service, provider.token(claims={"groups": ["viewers"]}))["user"]["id"]
    member = f"/v1/projects/{vision}/members/{user_id}"
    assert client.put(member, json={"role": "member"}).status_code == 200
    for groups, role in (([], "member"), (["viewers"], "member"), (["viewers", "owners"], "owner")):
        assert roles(service, provider.token(claims={"groups": groups})) == {"vision": role}
    assert client.put(member, json={"role": "owner"}).status_code == 200
    assert roles(service, provider.token(claims={"groups": ["members"]})) == {"vision": "owner"}


def test_a_removed_membership_ends_within_a_second(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    token = provider.token()
    assert status(service, token) == 403  # the user exists but is in no project
    user = me(service, token)["user"]
    assert sso_users(client) == [user]
    member = f"/v1/projects/{vision}/members/{user['id']}"
    assert client.put(member, json={"role": "viewer"}).status_code == 200
    wait_until(lambda: status(service, token) == 200, 1)
    assert client.delete(member).status_code == 204
    wait_until(lambda: status(service, token) == 403, 1)


@on_one_database
def test_an_admin_claim_applies_only_to_its_token(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    shown = me(service, provider.token(claims={"groups": ["admins", "viewers"]}))
    assert (shown["is_admin"], shown["scopes"]) == (True, ["admin"])
    assert not shown["user"]["is_admin"]
    with Client(service.url, provider.token(claims={"groups": ["admins"]})) as ada:
        assert ada.get("/v1/users").status_code == 200
    with Client(service.url, provider.token(claims={"groups": ["viewers"]})) as ada:
        problem(ada.get("/v1/users"), 403, "forbidden")


@on_one_database
def test_a_claim_for_an_unknown_project_gives_no_role(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    token = provider.token(claims={"groups": ["speech", "viewers"]})
    assert roles(service, token) == {"vision": "viewer"}
    speech = new_project(client, "speech")
    wait_until(lambda: roles(service, token) == {"vision": "viewer", "speech": "member"}, 1)
    assert client.delete(f"/v1/projects/{speech}").status_code == 204
    wait_until(lambda: roles(service, token) == {"vision": "viewer"}, 1)


@on_one_database
def test_another_membership_does_not_change_the_default_project_of_a_token(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    token = provider.token(claims={"groups": ["members"], "email": "ada@example.com"})
    ada_id = me(service, token)["user"]["id"]
    speech = new_project(client, "speech")
    key = client.post(
        "/v1/api-keys", json={"name": "of an owner", "project_id": speech, "role": "owner"}
    ).json()["key"]
    membership = f"/v1/projects/{speech}/members/{ada_id}"
    with Client(service.url, key) as owner, Client(service.url, token) as ada:
        [found] = owner.items("/v1/users", email="ada@example.com")
        assert (found["id"], found["is_admin"]) == (ada_id, None)
        assert owner.put(membership, json={"role": "member"}).status_code == 200
        wait_until(lambda: roles(service, token).keys() == {"vision", "speech"}, 1)
        assert ada.create()["project_id"] == vision
        assert ada.create(project_id=speech)["project_id"] == speech
        assert ada.delete(membership).status_code == 204
        wait_until(lambda: roles(service, token).keys() == {"vision"}, 1)


@on_one_database
def test_a_viewer_cannot_remove_other_members(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    other = client.post("/v1/users", json={"name": "Grace"}).json()["id"]
    membership = f"/v1/projects/{vision}/members/{other}"
    assert client.put(membership, json={"role": "viewer"}).status_code == 200
    with Client(service.url, provider.token(claims={"groups": ["viewers"]})) as ada:
        problem(ada.delete(membership), 403, "forbidden")


@on_one_database
def test_a_user_in_several_projects_must_name_one(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    speech = new_project(client, "speech")
    with Client(service.url, provider.token(claims={"groups": ["members", "speech"]})) as ada:
        answer = ada.post("/v1/instances", json={"image": "mooring-test/busybox:1"})
        problem(answer, 422, "project_required")
        assert ada.create(project_id=speech)["project_id"] == speech


def test_name_and_email_follow_the_claims(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    def sign_on(**claims: object) -> dict[str, Any]:
        user = me(service, provider.token(claims={"groups": ["viewers"], **claims}))["user"]
        return {name: user[name] for name in ("name", "email", "version")}

    assert sign_on(name="Ada Byron") == {"name": "Ada Byron", "email": None, "version": 1}
    assert sign_on(name="Ada\x00Byron\n") == {"name": "Ada Byron", "email": None, "version": 1}
    assert sign_on(name="Ada Lovelace", email="a@b.test") == {
        "name": "Ada Lovelace",
        "email": "a@b.test",
        "version": 2,
    }
    # A missing or invalid claim changes nothing.
    unchanged = {"name": "Ada Lovelace", "email": "a@b.test", "version": 2}
    for email in ("nobody", "c@d.test\x00", "x" * 300 + "@d.test", 7, None):
        assert sign_on(email=email) == unchanged
    assert sign_on(email="c@d.test", email_verified=False) == unchanged
    assert [entry["action"] for entry in client.items("/v1/audit-log")].count("user.update") == 1


def test_an_email_claim_does_not_match_an_existing_user(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    answer = client.post("/v1/users", json={"name": "Ada", "email": "ada@example.com", "is_admin": True})
    assert answer.status_code == 201
    claims = {"groups": ["viewers"], "name": "Eve", "email": "ada@example.com"}
    for _ in range(2):
        shown = me(service, provider.token("eve", claims=claims))
        assert (shown["user"]["name"], shown["user"]["email"]) == ("Eve", None)
        assert not shown["is_admin"]
    assert shown["user"]["id"] != answer.json()["id"]


def test_a_deleted_user_is_rejected_and_not_created_again(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    token = provider.token(claims={"groups": ["admins"]})
    user_id = me(service, token)["user"]["id"]
    assert client.delete(f"/v1/users/{user_id}").status_code == 204
    wait_until(lambda: status(service, token) == 401, 1)
    problem(get_with_token(service, provider.token(claims={"groups": ["admins"]})), 401, "unauthorized")
    assert sso_users(client) == []
    assert me(service, provider.token("bob", claims={"groups": ["viewers"]}))["user"]["name"] == "bob"


@on_one_database
def test_without_an_issuer_a_token_is_rejected_as_an_unknown_key(
    database_url: str, tmp_path: Path, provider: Provider
) -> None:
    with running(settings_for(database_url, tmp_path / "data")) as service:
        token = provider.token(claims={"groups": ["admins"]})
        with_token, with_key = (
            problem(get_with_token(service, secret), 401, "unauthorized") for secret in (token, "mk_unknown")
        )
    assert with_token["detail"] == with_key["detail"]


@on_one_database
def test_a_role_from_a_claim_alone_does_not_allow_keys(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    token = provider.token(claims={"groups": ["members"]})
    user_id = me(service, token)["user"]["id"]
    body = {"name": "laptop", "user_id": user_id, "role": "member"}
    with Client(service.url, token) as user_client:
        problem(user_client.post("/v1/api-keys", json=body), 422, "no_membership")
        put = client.put(f"/v1/projects/{vision}/members/{user_id}", json={"role": "member"})
        assert put.status_code == 200
        assert user_client.post("/v1/api-keys", json=body).status_code == 201


@on_one_database
def test_an_owner_cannot_take_a_project_name_used_in_role_claims(
    service: RunningService, client: Client, vision: str, provider: Provider
) -> None:
    with Client(service.url, provider.token(claims={"groups": ["owners"]})) as owner:
        problem(owner.patch(f"/v1/projects/{vision}", json={"name": "speech"}), 403, "forbidden")
        assert owner.patch(f"/v1/projects/{vision}", json={"name": "seeing"}).status_code == 200
    assert client.patch(f"/v1/projects/{vision}", json={"name": "speech"}).status_code == 200
