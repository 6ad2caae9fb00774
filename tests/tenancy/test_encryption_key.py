"""Replacement of the operator's encryption key."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, text

from mooring.control import gateway_keys
from mooring.control.audit import audit_log, signing_keys
from mooring.control.audit.signing_keys import AuditKeys
from mooring.control.gateway_keys import GatewayKeyKind
from mooring.control.tenants.encryption import Encryptor, WrongEncryptionKey, keys_in
from mooring.core.access import on_host
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import Registry, Secret
from mooring.settings import Settings
from tests.service import running
from tests.tenancy.operator_keys import NEW, OLD, settings_with, start_and_stop
from tests.tenancy.tenants import post
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases


def _settings(database_url: str, folder: Path, *keys: str) -> Settings:
    return settings_with("encryption_keys", keys, database_url, folder)


def _create_encrypted_values(settings: Settings) -> dict[str, Any]:
    with running(settings) as service, service.client as client:
        post(client, "/v1/secrets", name="token", value="s3cret")
        post(client, "/v1/registries", server="ghcr.io", username="ci", password="passw0rd")
        return dict(_post_key(client).json())


def _post_key(client: httpx.Client) -> httpx.Response:
    body = {"name": "k", "role": "viewer"}
    return client.post("/v1/api-keys", json=body, headers={"Idempotency-Key": "sealed"})


def _decrypted(settings: Settings, key: str) -> set[bytes]:
    """All encrypted values in the database, decrypted with only this key."""
    encryptor, database = Encryptor([key]), Database(settings.resolved_database_url, Signals())
    with database.read() as session:
        found = [
            *session.scalars(select(Secret.sealed_value)),
            *session.scalars(select(Registry.sealed_password)),
        ]
    database.dispose()
    return {encryptor.decrypt(sealed) for sealed in found}


def test_one_start_reencrypts_all_values_with_a_new_key(database_url: str, tmp_path: Path) -> None:
    old, both, new = (_settings(database_url, tmp_path, *keys) for keys in ((OLD,), (NEW, OLD), (NEW,)))
    made = _create_encrypted_values(old)
    assert _decrypted(old, OLD) == {b"s3cret", b"passw0rd"}
    with running(both) as service, service.client as client:
        again = _post_key(client)
        assert (again.json(), again.headers["idempotency-replayed"]) == (made, "true")
    assert _decrypted(new, NEW) == {b"s3cret", b"passw0rd"}
    start_and_stop(new)
    with pytest.raises(WrongEncryptionKey):
        start_and_stop(old)


def test_a_replica_that_still_uses_the_old_key_loses_nothing(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/operating.md describes: first `old,new` on each replica, then `new,old`, then `new`."""
    first, second, third = (
        _settings(database_url, tmp_path, *keys) for keys in ((OLD, NEW), (NEW, OLD), (NEW,))
    )
    with running(first) as service, service.client as client:
        start_and_stop(second)  # another replica
        post(client, "/v1/secrets", name="token", value="s3cret")
    caplog.clear()
    start_and_stop(third)
    assert "1 secrets, registry passwords, keys or stored answers need an older encryption key" in caplog.text
    start_and_stop(second)
    caplog.clear()
    start_and_stop(third)
    assert "older encryption key" not in caplog.text
    assert _decrypted(third, NEW) == {b"s3cret"}


def _waits_for_a_lock(database: Database) -> bool:
    with database.read() as session:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return bool(session.scalar(query))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has one writer at a time
def test_gateway_keys_rotated_while_a_server_starts_with_a_new_key_are_kept(
    database_url: str, tmp_path: Path
) -> None:
    old, both = (_settings(database_url, tmp_path, *keys) for keys in ((OLD,), (NEW, OLD)))
    start_and_stop(old)
    database, encryptor = Database(old.resolved_database_url, Signals()), Encryptor([NEW, OLD])
    audit_log.sign_with(database, AuditKeys(keys_in(tmp_path, signing_keys.KEY_FILE)))
    starting = threading.Thread(target=start_and_stop, args=(both,))
    with database.write() as session:
        gateway_keys.rotate(session, on_host("test"), encryptor, GatewayKeyKind.LINK)
        session.flush()
        rotated = gateway_keys.link_keys(session, encryptor)
        starting.start()
        wait_until(lambda: _waits_for_a_lock(database), 30)
    starting.join(30)
    with database.read() as session:
        assert gateway_keys.link_keys(session, Encryptor([NEW])) == rotated
    database.dispose()
