"""Webhooks in the API: their secrets, their limits, who may have which, and PUT by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mooring.db.tables import Webhook
from tests.api.tenants.test_secrets import Tenant
from tests.problems import problem
from tests.service import Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases
# Names of this domain have no address, so nothing is sent.
URL = "https://receiver.invalid/T0/a-secret-path"
BY_NAME = "/v1/webhooks/by-name/chat"


@pytest.fixture
def tenant(shared: Client) -> Iterator[Tenant]:
    with Tenant(shared, f"webhooks-{uuid4().hex[:8]}") as made:
        yield made


def _create(client: Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/webhooks", json={"url": URL, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/webhooks/{answer.json()['id']}"
    return dict(answer.json())


def test_a_secret_is_shown_once_and_stored_encrypted(tenant: Tenant, shared_service: RunningService) -> None:
    made = _create(tenant.owner)
    path = f"/v1/webhooks/{made['id']}"
    secret = made.pop("secret")
    assert secret.startswith("whsec_")
    assert tenant.owner.get(path).json() == made
    assert tenant.owner.items("/v1/webhooks") == [made]
    assert (made["events"], made["enabled"], made["format"]) == (["notices"], True, "standard")
    assert made["name"] == f"webhook-{made['id'][-6:]}"
    with shared_service.plane.database.read() as session:
        row = session.get_one(Webhook, made["id"])
        assert secret.encode() not in row.sealed_secret
        assert shared_service.plane.encryptor.decrypt(row.sealed_secret) == secret.encode()
    entries = tenant.owner.items("/v1/audit-log")
    assert entries[0]["action"] == "webhook.create"
    assert entries[0]["after"]["url"] == "https://receiver.invalid/…"
    assert secret not in str(entries)
    assert "a-secret-path" not in str(entries)


def test_a_repeated_create_shows_the_same_secret(tenant: Tenant) -> None:
    headers = {"Idempotency-Key": uuid4().hex}
    first, second = (
        tenant.owner.post("/v1/webhooks", json={"url": URL}, headers=headers).json() for _ in range(2)
    )
    assert first == second


def test_fields_can_be_changed(tenant: Tenant) -> None:
    made = _create(tenant.owner, name="chat")
    path = f"/v1/webhooks/{made['id']}"
    changes = {"name": "other", "url": f"{URL}2", "events": ["instance.gpu_fault"], "enabled": False}
    answer = tenant.owner.patch(path, json=changes, headers={"If-Match": '"1"'})
    assert answer.json() == {
        key: value for key, value in {**made, **changes, "version": 2}.items() if key != "secret"
    }
    problem(tenant.owner.patch(path, json=changes, headers={"If-Match": '"1"'}), 412, "precondition_failed")
    _create(tenant.owner, name="chat")
    problem(tenant.owner.patch(path, json={"name": "chat"}), 409, "name_taken")
    problem(tenant.owner.post("/v1/webhooks", json={"url": URL, "name": "chat"}), 409, "name_taken")
    assert tenant.owner.delete(path).status_code == 204
    problem(tenant.owner.get(path), 404, "not_found")


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example/", "https://127.0.0.1/", "https://[::ffff:127.0.0.1]/", "https://2130706433/",
        "https://169.254.169.254/latest", "https://user@receiver.example/", "https://10.0.0.1:8443/x",
    ],
)  # fmt: skip
def test_urls_that_are_not_public_are_rejected(tenant: Tenant, url: str) -> None:
    found = problem(tenant.owner.post("/v1/webhooks", json={"url": url}), 422, "webhook_url_not_allowed")
    assert found["errors"][0]["pointer"] == "/url"
    made = _create(tenant.owner)
    answer = tenant.owner.patch(f"/v1/webhooks/{made['id']}", json={"url": url})
    problem(answer, 422, "webhook_url_not_allowed")
    problem(tenant.owner.put(BY_NAME, json={"url": url}), 422, "webhook_url_not_allowed")


@pytest.mark.parametrize(
    "body",
    [
        {"url": "ftp://receiver.example/"}, {"url": "https://receiver.example/ x"},
        {"url": URL, "events": []},
        {"url": URL, "events": ["instance.unknown"]}, {"url": URL, "format": "teams"}, {},
        {"url": URL, "secret": "whsec_x"},
    ],
)  # fmt: skip
def test_invalid_webhooks_are_rejected(tenant: Tenant, body: dict[str, Any]) -> None:
    problem(tenant.owner.post("/v1/webhooks", json=body), 422, "validation_failed")


def test_only_admins_get_events_of_all_projects(shared: Client, tenant: Tenant) -> None:
    body = {"url": URL, "all_projects": True}
    problem(tenant.owner.post("/v1/webhooks", json=body), 403, "forbidden")
    problem(tenant.owner.put(BY_NAME, json=body), 403, "forbidden")
    found = problem(
        shared.post("/v1/webhooks", json={**body, "project_id": tenant.id}), 422, "validation_failed"
    )
    assert found["errors"][0]["code"] == "all_projects"
    made = _create(shared, all_projects=True, name=f"all-{uuid4().hex[:8]}")
    assert made["project_id"] is None
    path = f"/v1/webhooks/{made['id']}"
    for caller in (tenant.owner, tenant.member):
        for answer in (caller.get(path), caller.delete(path), caller.get(f"{path}/deliveries")):
            problem(answer, 404 if caller is tenant.owner else 403, answer.json()["code"])
    assert made["id"] not in [each["id"] for each in tenant.owner.items("/v1/webhooks")]
    problem(shared.post("/v1/webhooks", json={**body, "name": made["name"]}), 409, "name_taken")
    assert shared.delete(path).status_code == 204


def test_a_delivery_belongs_to_its_webhook(tenant: Tenant) -> None:
    one, other = _create(tenant.owner), _create(tenant.owner)
    delivery = tenant.owner.post(f"/v1/webhooks/{one['id']}/test").json()
    path = f"/v1/webhooks/{other['id']}/deliveries"
    problem(tenant.owner.post(f"{path}/{delivery['id']}/replay"), 404, "not_found")
    assert tenant.owner.items(path) == []
    path = f"/v1/webhooks/{one['id']}/deliveries"
    (shown,) = wait_until(lambda: [each for each in tenant.owner.items(path) if each["last_error"]])
    assert (shown["id"], shown["last_error"]) == (delivery["id"], "name_not_resolved")


def test_deliveries_are_paged(tenant: Tenant) -> None:
    path = f"/v1/webhooks/{_create(tenant.owner)['id']}"
    made = [tenant.owner.post(f"{path}/test").json()["id"] for _ in range(5)]
    found, cursor = [], None
    while True:
        params = {"limit": 2, **({"cursor": cursor} if cursor else {})}
        page = tenant.owner.get(f"{path}/deliveries", params=params).json()
        found += [each["id"] for each in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == made[::-1]
    assert tenant.owner.items(f"{path}/deliveries", status="dropped") == []


def test_a_project_can_have_20(tenant: Tenant) -> None:
    for _ in range(20):
        _create(tenant.owner)
    problem(tenant.owner.post("/v1/webhooks", json={"url": URL}), 409, "too_many")


def test_put_by_name_creates_changes_and_leaves(tenant: Tenant) -> None:
    body = {"url": URL, "events": ["instance.state_changed"]}
    plan = tenant.owner.put(BY_NAME, json=body, params={"dry_run": True}).json()
    assert (plan["outcome"], plan["id"]) == ("created", None)
    assert tenant.owner.items("/v1/webhooks") == []
    made = tenant.owner.put(BY_NAME, json=body)
    assert (made.status_code, made.headers["mooring-applied"]) == (201, "created")
    assert "secret" not in made.json()
    same = tenant.owner.put(BY_NAME, json=body)
    assert (same.status_code, same.headers["mooring-applied"]) == (200, "unchanged")
    assert same.json() == made.json()
    other = {**body, "url": f"{URL}2", "enabled": False}
    plan = tenant.owner.put(BY_NAME, json=other, params={"dry_run": True}).json()
    assert plan["outcome"] == "changed"
    changes = {each["pointer"]: each for each in plan["changes"]}
    assert changes["/url"]["after"] is None  # a URL may be a credential
    assert (changes["/enabled"]["before"], changes["/enabled"]["after"]) == ("true", "false")
    changed = tenant.owner.put(BY_NAME, json=other)
    assert (changed.status_code, changed.headers["mooring-applied"]) == (200, "changed")
    assert (changed.json()["url"], changed.json()["version"]) == (f"{URL}2", 2)
    problem(tenant.owner.put(BY_NAME, json={**body, "name": "another"}), 422, "validation_failed")


def test_webhooks_end_with_their_project(shared: Client) -> None:
    with Tenant(shared, f"ended-{uuid4().hex[:8]}") as tenant:
        made = _create(tenant.owner)
        tenant.owner.post(f"/v1/webhooks/{made['id']}/test")
        assert shared.delete(f"/v1/projects/{tenant.id}").status_code == 204
        problem(shared.get(f"/v1/webhooks/{made['id']}"), 404, "not_found")


def test_secrets_are_encrypted_again_with_a_new_key(tmp_path: Path) -> None:
    old, new = "A" * 43 + "=", "Q" * 43 + "="
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    with (
        running(settings_for(url, tmp_path / "data", encryption_keys=old)) as service,
        service.client as client,
    ):
        made = _create(client)
        client.post(f"/v1/webhooks/{made['id']}/rotate-secret")
    with running(settings_for(url, tmp_path / "data", encryption_keys=f"{new},{old}")):
        pass
    with (
        running(settings_for(url, tmp_path / "data", encryption_keys=new)) as service,
        service.plane.database.read() as session,
    ):
        row = session.get_one(Webhook, made["id"])
        assert row.sealed_former_secret is not None
        assert service.plane.encryptor.decrypt(row.sealed_former_secret) == made["secret"].encode()
