"""The audit log: content of rows, protection from changes, and export."""

import asyncio
import hashlib
import hmac
import json
from base64 import urlsafe_b64decode
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DatabaseError

from mooring.api.routes import audit as audit_api
from mooring.auth import credentials as auth
from mooring.auth.rate_limits import FailedAttempts
from mooring.core.access import Access, Permission
from mooring.db.tables import AuditEntry
from mooring_client.errors import Unauthorized
from mooring_client.schemas.projects import Role
from tests.concurrency import run_concurrently
from tests.service import Client, RunningService
from tests.tenancy.audit_logs import await_links, mooring, verified
from tests.tenancy.calls import CALLS
from tests.tenancy.matrix import MATRIX
from tests.tenancy.tenants import IMAGE, NOWHERE, Setup, make_key, post

pytestmark = pytest.mark.both_databases

JSON_LINES = {"Accept": "application/x-ndjson"}


def _newest(client: Client, **filters: Any) -> dict[str, Any]:
    return client.items("/v1/audit-log", limit=1, **filters)[0]


def test_a_row_has_actor_address_action_and_target(setup: Setup) -> None:
    person = setup.a.people[Role.MEMBER]
    headers = {"X-Request-Id": "of-this-test"}
    body = {"image": IMAGE, "node_selector": NOWHERE, "env": {"TOKEN": "canary-of-env"}}
    made = person.client.post("/v1/instances", json=body, headers=headers).json()
    row = _newest(setup.a.owner)
    assert row["actor"] == {
        "kind": "key", "id": person.key["id"], "name": person.key["name"], "user_id": person.id,
    }  # fmt: skip
    assert (row["address"], row["request_id"]) == ("127.0.0.1", "of-this-test")
    assert (row["action"], row["target_id"], row["project_id"]) == ("instance.create", made["id"], setup.a.id)
    assert (row["before"], row["after"]["name"]) == (None, made["name"])
    assert abs(datetime.now(UTC) - datetime.fromisoformat(row["at"])) < timedelta(seconds=30)
    assert "canary-of-env" not in json.dumps(row)


def _change(client: Client, method: str, path: str, body: Any = None) -> None:
    answer = client.request(method, path, json=body)
    assert answer.is_success, answer.text


def test_a_row_has_the_values_before_and_after_a_change(setup: Setup) -> None:
    project, admin = f"/v1/projects/{setup.a.id}", setup.admin
    _change(admin, "PATCH", project, {"labels": {"x": "1"}, "weight": 1.5})
    _change(admin, "PATCH", project, {"labels": {"x": "2"}, "weight": 1.5, "quotas": {"cpus": 1000.0}})
    row = _newest(setup.a.owner)
    assert row["before"] == {"labels": {"x": "1"}, "quotas": {}}
    assert (row["after"]["labels"], row["after"]["quotas"]["cpus"]) == ({"x": "2"}, 1000.0)
    assert row["after"].keys() == row["before"].keys()
    instance = f"/v1/instances/{setup.pending}"
    _change(setup.a.member, "PATCH", instance, {"labels": {"of": "alpha", "y": "1"}, "max_duration_s": None})
    row = _newest(setup.a.owner)
    assert row["before"].keys() == row["after"].keys() == {"labels"}
    assert row["after"] == {"labels": {"of": "alpha", "y": "1"}}
    user = post(admin, "/v1/users", name="Ada")["id"]
    _change(admin, "PATCH", f"/v1/users/{user}", {"name": "Ada L.", "is_admin": True})
    row = _newest(admin, target_id=user)
    assert row["before"] == {"name": "Ada", "is_admin": False}
    assert row["after"] == {"name": "Ada L.", "is_admin": True}
    for role, before in (("viewer", None), ("owner", {"role": "viewer"})):
        _change(setup.a.owner, "PUT", f"{project}/members/{user}", {"role": role})
        row = _newest(setup.a.owner, target_id=user)
        assert (row["before"], row["after"]) == (before, {"role": role})
    _change(setup.a.owner, "DELETE", f"{project}/members/{user}")
    row = _newest(setup.a.owner, target_id=user)
    assert (row["action"], row["before"], row["after"]) == ("member.delete", {"role": "owner"}, None)


def test_rows_about_keys_and_tokens_do_not_contain_secrets(setup: Setup) -> None:
    made = make_key(setup.a.owner, role="viewer", scopes=["instances:read"], name="ci")
    row = _newest(setup.a.owner, target_id=made["id"])
    assert row["after"].items() >= {"name": "ci", "prefix": made["prefix"], "role": "viewer"}.items()
    assert made["key"] not in json.dumps(row)
    setup.a.owner.delete(f"/v1/api-keys/{made['id']}")
    row = _newest(setup.a.owner, target_id=made["id"])
    assert (row["action"], row["before"]["name"], row["after"]) == ("api_key.delete", "ci", None)
    token = post(setup.admin, "/v1/join-tokens", ttl_s=60)
    assert token["token"] not in json.dumps(_newest(setup.admin, target_id=token["id"]))


# These operations return the ID of the created resource; the others have it in the path. A PUT has no key.
CREATE_OPERATIONS = sorted(
    operation
    for operation, row in MATRIX.items()
    if row["admin"] == 201 and operation != "join_node" and not operation.startswith("apply_")
)


@pytest.mark.parametrize("operation", CREATE_OPERATIONS)
def test_a_repeated_request_is_audited_once(setup: Setup, operation: str) -> None:
    document = setup.admin.get("/openapi.json").json()
    (path,) = [
        path
        for path, methods in document["paths"].items()
        if methods.get("post", {}).get("operationId") == operation
    ]
    call = CALLS[operation](setup, "admin")
    first, again = (
        call.send(setup.admin, "POST", path, X_Request_Id=f"{number}-{operation}", Idempotency_Key=operation)
        for number in ("first", "again")
    )
    assert (first.status_code, again.content) == (201, first.content)
    with setup.service.plane.database.read() as session:
        of_both = AuditEntry.request_id.in_([f"first-{operation}", f"again-{operation}"])
        (row,) = session.scalars(select(AuditEntry).where(of_both)).all()
    assert row.request_id == f"first-{operation}"
    # A certificate has no id: the target is its holder. Neither has a link: the target is its instance.
    without_id = call.path.get("instance_id", row.actor["id"])
    assert row.target_id == first.json().get("id", without_id)


def test_owners_see_the_rows_of_their_projects_and_admins_see_all(setup: Setup) -> None:
    post(setup.admin, "/v1/join-tokens", ttl_s=60)
    of_b = setup.b.owner.items("/v1/audit-log", limit=200)
    assert {row["project_id"] for row in of_b} == {setup.b.id}
    everything = setup.admin.items("/v1/audit-log", limit=200)
    assert {row["project_id"] for row in everything} >= {setup.a.id, setup.b.id, None}
    member_of_a = setup.a.people[Role.MEMBER].key["id"]
    assert setup.b.owner.items("/v1/audit-log", actor_id=member_of_a) == []
    setup.pending_instance()
    found = setup.a.owner.items("/v1/audit-log", actor_id=member_of_a, action="instance.create")
    assert {(row["actor"]["id"], row["action"]) for row in found} == {(member_of_a, "instance.create")}


def _exported(client: Client) -> list[dict[str, Any]]:
    answer = client.get("/v1/audit-log", headers=JSON_LINES)
    assert answer.headers["content-type"].startswith(JSON_LINES["Accept"])
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.content.splitlines()]


def _signature_holds(service: RunningService, row: dict[str, Any]) -> bool:
    """Verify the signature as the OpenAPI document describes it, without the service's code."""
    secret = urlsafe_b64decode((service.plane.settings.data_dir / "audit.key").read_text().strip())
    fields = {name: row[name] for name in row.keys() - {"seq", "previous_hash", "hash", "link"}}
    signed_text = "row\n" + json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return bool(
        row["hash"].split(":")[2] == hmac.new(secret, signed_text.encode(), hashlib.sha256).hexdigest()
    )


def test_the_export_is_complete_and_verifiable_with_the_key(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_api, "_BATCH", 5)
    post(setup.admin, "/v1/users", name='Zoë 🚀 \u2028 "quoted" \\', email="zoe@example.com")
    _change(setup.admin, "PATCH", f"/v1/projects/{setup.b.id}", {"weight": 1.0, "quotas": {"cpus": 1000.1}})
    await_links(setup.service)
    rows = _exported(setup.admin)
    with setup.service.plane.database.read() as session:
        assert len(rows) == session.scalar(select(func.count()).select_from(AuditEntry))
    assert rows[-1]["action"] == "audit.export"
    assert len(rows) > 2 * 5
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert all(_signature_holds(setup.service, row) for row in rows)
    of_b = [row for row in rows if row["project_id"] == setup.b.id]
    assert [row["link"]["position"] for row in of_b] == list(range(1, len(of_b) + 1))
    assert {row["link"]["chain"] for row in of_b} == {setup.b.id}
    exported = _exported(setup.b.owner)
    assert exported[:-1] == of_b
    assert (exported[-1]["action"], exported[-1]["project_id"]) == ("audit.export", setup.b.id)


APPEND_ONLY = "append-only"
FORBIDDEN = (
    "UPDATE audit_log SET action = 'nothing.happened'",
    "UPDATE audit_links SET position = position + 1",
    "UPDATE audit_heads SET links = 0",
    "DELETE FROM audit_links",
    "DELETE FROM audit_heads",
    "UPDATE audit_log SET after = NULL WHERE seq = (SELECT min(seq) FROM audit_log)",
    "DELETE FROM audit_log",
    "DELETE FROM audit_log WHERE seq = (SELECT max(seq) FROM audit_log)",
)
FORBIDDEN_BY_DIALECT = {
    "postgresql": (
        "TRUNCATE audit_log",
        "TRUNCATE audit_links",
        "TRUNCATE audit_heads",
        "INSERT INTO audit_log SELECT * FROM audit_log LIMIT 1 "
        "ON CONFLICT (seq) DO UPDATE SET action = 'nothing.happened'",
    ),
    "sqlite": (
        "REPLACE INTO audit_log SELECT * FROM audit_log LIMIT 1",
        "REPLACE INTO audit_heads SELECT * FROM audit_heads LIMIT 1",
        "REPLACE INTO audit_links SELECT * FROM audit_links LIMIT 1",
        "REPLACE INTO audit_links SELECT number + 100000, entry_seq, 'x', 1, hash FROM audit_links LIMIT 1",
        "REPLACE INTO audit_links "
        "SELECT number + 100000, entry_seq + 100000, chain, position, hash FROM audit_links LIMIT 1",
        "UPDATE OR REPLACE audit_log SET seq = 1",
    ),
}


def test_the_database_rejects_changes_of_audit_rows(setup: Setup) -> None:
    engine = setup.service.plane.database.engine
    await_links(setup.service)
    before = setup.admin.get("/v1/audit-log").content
    for statement in (*FORBIDDEN, *FORBIDDEN_BY_DIALECT[engine.dialect.name]):
        with pytest.raises(DatabaseError, match=APPEND_ONLY), engine.begin() as connection:
            connection.execute(text(statement))
    assert setup.admin.get("/v1/audit-log").content == before


def test_commands_on_the_servers_host_verify_and_export_the_log(
    service: RunningService, client: Client
) -> None:
    for number in range(3):
        post(client, "/v1/users", name=f"user-{number}")
    await_links(service)
    verify = mooring(service, "audit", "verify")
    # The rows of the key and of three users.
    assert (verify.exit_code, verify.output.split()[0]) == (0, "4"), verify.output
    exported = mooring(service, "audit", "export")
    assert exported.exit_code == 0
    before = [json.loads(line) for line in exported.output.splitlines()]
    # The export over the API is recorded too.
    assert before == _exported(client)[:-1]


def test_the_chains_are_intact_with_many_concurrent_writers(service: RunningService, client: Client) -> None:
    def write(number: int) -> int:
        with Client(service.url) as caller:
            return sum(
                caller.post("/v1/users", json={"name": f"{number}-{turn}"}).status_code == 201
                for turn in range(4)
            )

    assert sum(run_concurrently(32, write)) == 32 * 4
    await_links(service)
    report = verified(service)
    assert (report.rows, report.unlinked, report.problems) == (1 + 32 * 4, 0, [])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_an_export_is_aborted_when_its_key_is_revoked(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted export must not look complete. Without HTTP, which would buffer it before the revocation."""
    monkeypatch.setattr(audit_api, "_BATCH", 1)
    monkeypatch.setattr(auth, "RENEWED_S", 0.0)
    made = make_key(client, scopes=["admin"])
    for name in ("one", "two", "three"):
        post(client, "/v1/projects", name=name)
    credentials = auth.Credentials(service.plane.database, FailedAttempts(on=True))

    async def export() -> list[bytes]:
        access = Access(await credentials.caller(made["key"]), Permission.OWN)
        live = auth.LiveAccess(access, credentials, made["key"])
        pages = audit_api._exported(service.service._server._context, live, audit_api.AuditQuery())
        read = [await anext(pages), await anext(pages)]
        assert client.delete(f"/v1/api-keys/{made['id']}").status_code == 204
        with pytest.raises(Unauthorized):
            await anext(pages)
        return read

    assert len(asyncio.run(export())) == 2 < len(client.items("/v1/audit-log"))
