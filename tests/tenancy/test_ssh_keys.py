"""SSH keys and certificates: what they act as, who sees them, and what ends them."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from mooring.control import gateway_keys
from mooring.control.tenants import ssh_holders, ssh_keys
from mooring.control.tenants.ssh_holders import Holder
from mooring.core.access import Caller, Permission
from mooring.db.tables import SshKey, User
from mooring.db.types import now
from mooring_client.errors import NoMembership, Unauthorized
from mooring_client.schemas.projects import Role
from tests.concurrency import run_concurrently
from tests.problems import problem
from tests.service import Client, running, settings_for
from tests.tenancy.calls import public_key
from tests.tenancy.tenants import Setup, make_key, post


def register(client: Client, **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/ssh-keys", **{"name": "laptop", "public_key": public_key(), **fields})


def caller_of(setup: Setup, key: dict[str, Any]) -> Caller:
    """Raises Unauthorized."""
    with setup.service.plane.database.read() as session:
        return ssh_keys.caller_of(session, key["id"])


def is_valid(setup: Setup, key: dict[str, Any]) -> bool:
    with setup.service.plane.database.read() as session:
        return key["id"] in ssh_keys.matching(session, key["fingerprint"])


def test_a_key_acts_as_what_registered_it(setup: Setup) -> None:
    for person in setup.a.people[Role.MEMBER], setup.a.people[Role.OWNER]:
        key = register(person.client)
        assert (key["api_key_id"], key["user_id"]) == (person.key["id"], None)
        caller = caller_of(setup, key)
        assert (caller.id, caller.user_id) == (person.key["id"], person.id)
        assert caller.permissions.keys() == {setup.a.id}
        assert is_valid(setup, key)


def test_an_admins_key_can_be_limited_to_a_project(setup: Setup) -> None:
    limited = caller_of(setup, register(setup.admin, project_id=setup.a.id))
    assert not limited.everywhere
    assert limited.permissions.keys() == {setup.a.id}
    assert caller_of(setup, register(setup.admin)).is_admin


def test_a_key_for_an_unknown_or_deleted_project_is_refused(setup: Setup) -> None:
    gone = post(setup.admin, "/v1/projects", name="gone")["id"]
    assert setup.admin.delete(f"/v1/projects/{gone}").status_code == 204
    for project in ("prj_01k0000000000000000000000", gone):
        body = {"name": "k", "public_key": public_key(), "project_id": project}
        problem(setup.admin.post("/v1/ssh-keys", json=body), 404, "not_found")


def test_a_key_registered_twice_is_refused_and_names_the_first(setup: Setup) -> None:
    key = register(setup.a.member)
    body = {"name": "again", "public_key": key["public_key"]}
    refused = problem(setup.a.member.post("/v1/ssh-keys", json=body), 409, "ssh_key_exists")
    assert refused["id"] == key["id"]
    # Another credential may register it too.
    assert register(setup.a.owner, public_key=key["public_key"])["fingerprint"] == key["fingerprint"]


def test_the_number_of_keys_is_limited(setup: Setup) -> None:
    client = Client(str(setup.admin.base_url), key=make_key(setup.a.owner, role="member")["key"])

    def attempt(_number: int) -> int:
        body = {"name": "k", "public_key": public_key()}
        return client.post("/v1/ssh-keys", json=body).status_code

    with client:
        for _ in range(ssh_keys.LIMIT - 2):
            register(client)
        statuses = run_concurrently(6, attempt)
        assert sorted(statuses) == [201, 201, 409, 409, 409, 409]
        problem(client.post("/v1/ssh-keys", json={"name": "k", "public_key": public_key()}), 409, "too_many")


def test_a_private_key_is_refused_and_not_repeated(setup: Setup) -> None:
    secret = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "secret" * 3000 + "\n-----END OPENSSH PRIVATE KEY-----"
    for length in (5000, len(secret)):
        answer = setup.a.member.post("/v1/ssh-keys", json={"name": "k", "public_key": secret[:length]})
        assert answer.status_code == 422
        assert "secretsecret" not in answer.text
    refused = setup.a.member.post("/v1/ssh-keys", json={"name": "k", "public_key": secret[:5000]})
    assert "must not leave your machine" in problem(refused, 422, "invalid_public_key")["detail"]


def test_owners_see_and_delete_the_keys_of_their_project_only(setup: Setup) -> None:
    key = register(setup.a.member)
    elsewhere = register(setup.b.member)
    seen = {each["id"] for each in setup.a.owner.items("/v1/ssh-keys")}
    assert key["id"] in seen
    assert elsewhere["id"] not in seen
    assert key["id"] not in {each["id"] for each in setup.a.viewer.items("/v1/ssh-keys")}
    assert setup.a.owner.delete(f"/v1/ssh-keys/{key['id']}").status_code == 204
    problem(setup.a.member.get(f"/v1/ssh-keys/{key['id']}"), 404, "not_found")
    problem(setup.a.member.delete(f"/v1/ssh-keys/{key['id']}"), 404, "not_found")
    assert not is_valid(setup, key)


def test_a_revoked_api_key_takes_its_ssh_keys_with_it(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="member")
    with Client(str(setup.admin.base_url), key=made["key"]) as client:
        key = register(client)
    assert is_valid(setup, key)
    assert setup.a.owner.delete(f"/v1/api-keys/{made['id']}").status_code == 204
    problem(setup.admin.get(f"/v1/ssh-keys/{key['id']}"), 404, "not_found")
    with pytest.raises(Unauthorized):
        caller_of(setup, key)


def test_a_deleted_user_takes_their_ssh_keys_with_them(setup: Setup) -> None:
    user = post(setup.admin, "/v1/users", name="leaves", email="leaves@alpha.example")
    path = f"/v1/projects/{setup.a.id}/members/{user['id']}"
    assert setup.admin.put(path, json={"role": "member"}).status_code == 200
    made = make_key(setup.admin, project_id=setup.a.id, user_id=user["id"], role="member")
    with Client(str(setup.admin.base_url), key=made["key"]) as client:
        key = register(client)
    assert setup.admin.delete(f"/v1/users/{user['id']}").status_code == 204
    problem(setup.admin.get(f"/v1/ssh-keys/{key['id']}"), 404, "not_found")


def test_a_deleted_project_takes_its_ssh_keys_with_it(setup: Setup) -> None:
    project = post(setup.admin, "/v1/projects", name="short-lived")
    key = register(setup.admin, project_id=project["id"])
    assert setup.admin.delete(f"/v1/projects/{project['id']}").status_code == 204
    problem(setup.admin.get(f"/v1/ssh-keys/{key['id']}"), 404, "not_found")


def test_an_expired_key_is_not_valid(setup: Setup) -> None:
    key = register(setup.a.member, expires_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    assert is_valid(setup, key)
    with setup.service.plane.database.write() as session:
        session.get_one(SshKey, key["id"]).expires_at = now() - timedelta(seconds=1)
    assert not is_valid(setup, key)
    body = {"name": "k", "public_key": public_key(), "expires_at": "2020-01-01T00:00:00Z"}
    problem(setup.a.member.post("/v1/ssh-keys", json=body), 422, "expired")


def test_a_key_ends_with_the_role_of_its_user(setup: Setup) -> None:
    user = post(setup.admin, "/v1/users", name="demoted", email="demoted@alpha.example")
    path = f"/v1/projects/{setup.a.id}/members/{user['id']}"
    assert setup.admin.put(path, json={"role": "member"}).status_code == 200
    made = make_key(setup.admin, project_id=setup.a.id, user_id=user["id"], role="member")
    with Client(str(setup.admin.base_url), key=made["key"]) as client:
        key = register(client)
    assert setup.admin.put(path, json={"role": "viewer"}).status_code == 200
    assert not caller_of(setup, key).may_somewhere(Permission.EXEC)


def test_a_key_without_the_scope_exec_registers_nothing(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="member", scopes=["instances:read"])
    with Client(str(setup.admin.base_url), key=made["key"]) as client:
        body = {"name": "k", "public_key": public_key()}
        problem(client.post("/v1/ssh-keys", json=body), 403, "forbidden")
        problem(client.post("/v1/ssh-certificates", json={"public_key": public_key()}), 403, "forbidden")


def test_a_role_that_only_a_token_grants_is_not_enough(setup: Setup) -> None:
    with setup.service.plane.database.write() as session:
        user = User(id="usr_only_token", name="t", is_admin=False, version=1, created_at=now())
        session.add(user)
    holder = Holder("usr_only_token", setup.a.id)
    with setup.service.plane.database.write() as session, pytest.raises(NoMembership, match="ask an owner"):
        ssh_holders.locked(session, holder)


def test_the_last_use_is_recorded_once_a_minute(setup: Setup) -> None:
    key = register(setup.a.member)
    assert key["last_used_at"] is None
    for _ in range(2):
        with setup.service.plane.database.write() as session:
            ssh_keys.record_use(session, key["id"])
    first = setup.a.member.get(f"/v1/ssh-keys/{key['id']}").json()["last_used_at"]
    assert first is not None
    with setup.service.plane.database.write() as session:
        ssh_keys.record_use(session, key["id"])
    assert setup.a.member.get(f"/v1/ssh-keys/{key['id']}").json()["last_used_at"] == first


# Certificates.


def certify(client: Client, **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/ssh-certificates", **{"public_key": public_key(), **fields})


def parsed(certificate: str) -> serialization.SSHCertificate:
    found = serialization.load_ssh_public_identity(certificate.encode())
    assert isinstance(found, serialization.SSHCertificate)
    return found


def test_a_certificate_is_signed_and_names_its_holder(setup: Setup) -> None:
    person = setup.a.people[Role.MEMBER]
    made = certify(person.client, ttl_s=600)
    certificate = parsed(made["certificate"])
    certificate.verify_cert_signature()
    with setup.service.plane.database.read() as session:
        assert signer_of(certificate) in gateway_keys.public_ca_keys(session, setup.service.plane.encryptor)
    holder = f"{person.key['id']}/{setup.a.id}"
    assert certificate.valid_principals == [holder.encode()]
    assert certificate.key_id == holder.encode()
    expires_at = datetime.fromisoformat(made["expires_at"])
    assert certificate.valid_before == expires_at.timestamp()
    assert timedelta(seconds=590) < expires_at - datetime.now(UTC) <= timedelta(seconds=600)


def signer_of(certificate: serialization.SSHCertificate) -> str:
    signer = certificate.signature_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return signer.decode()


def test_a_certificate_does_not_outlast_the_api_key(setup: Setup) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    made = make_key(setup.a.owner, role="member", expires_at=soon.isoformat())
    with Client(str(setup.admin.base_url), key=made["key"]) as client:
        certificate = certify(client)
    assert datetime.fromisoformat(certificate["expires_at"]) <= soon


def test_a_certificate_acts_as_its_holder_and_ends_with_it(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="member")
    with Client(str(setup.admin.base_url), key=made["key"]) as client:
        (principal,) = parsed(certify(client)["certificate"]).valid_principals
    holder = Holder.from_text(principal.decode())
    with setup.service.plane.database.read() as session:
        assert ssh_holders.caller_of(session, holder).id == made["id"]
    assert setup.a.owner.delete(f"/v1/api-keys/{made['id']}").status_code == 204
    with setup.service.plane.database.read() as session, pytest.raises(Unauthorized):
        ssh_holders.caller_of(session, holder)


def test_a_security_key_is_not_certified(setup: Setup) -> None:
    parts = (b"sk-ssh-ed25519@openssh.com", bytes(range(32)), b"ssh:")
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    line = f"{parts[0].decode()} {base64.b64encode(blob).decode()}"
    refused = setup.a.member.post("/v1/ssh-certificates", json={"public_key": line})
    assert "POST /v1/ssh-keys" in problem(refused, 422, "invalid_public_key")["detail"]


@pytest.mark.parametrize("holder", ["", "nod_01k0000000000000000000000", "root", "ssh_x/prj_y"])
def test_a_certificate_for_anything_else_has_no_holder(setup: Setup, holder: str) -> None:
    with setup.service.plane.database.read() as session, pytest.raises(Unauthorized):
        ssh_holders.caller_of(session, Holder.from_text(holder))


def test_an_address_shows_the_host_key_to_pin(setup: Setup) -> None:
    shown = setup.a.viewer.get("/v1/me/ssh").json()
    (key,) = shown["host_keys"]
    assert shown["known_hosts"] == f"[{shown['host']}]:{shown['port']} {key}\n"
    assert shown["websocket_url"] is None
    assert setup.b.viewer.get("/v1/me/ssh").json() == shown


def test_an_address_shows_the_websocket_of_the_gateway(tmp_path: Path) -> None:
    settings = settings_for(
        f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path, gateway_url="https://gateway.example.org/"
    )
    with running(settings) as service, service.client as admin:
        shown = admin.get("/v1/me/ssh").json()
    assert shown["websocket_url"] == "wss://gateway.example.org/v1/ssh"
