"""The operator's encryption key: a new one takes over everything that is sealed."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from mooring.control.tenants.encryption import Encryptor, WrongEncryptionKey
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import Registry, Secret
from mooring.settings import Settings
from tests.service import running
from tests.tenancy.operator_keys import NEW, OLD, settings_with, start_and_end
from tests.tenancy.tenants import post


def _settings(database_url: str, folder: Path, *keys: str) -> Settings:
    return settings_with("encryption_keys", keys, database_url, folder)


def _seal_something(settings: Settings) -> dict[str, Any]:
    with running(settings) as service, service.client as client:
        post(client, "/v1/secrets", name="token", value="s3cret")
        post(client, "/v1/registries", server="ghcr.io", username="ci", password="passw0rd")
        return dict(_make_key_once(client).json())


def _make_key_once(client: httpx.Client) -> httpx.Response:
    body = {"name": "k", "role": "viewer"}
    return client.post("/v1/api-keys", json=body, headers={"Idempotency-Key": "sealed"})


def _opened(settings: Settings, key: str) -> set[bytes]:
    """What lies sealed in the database, opened with this key alone."""
    encryptor, database = Encryptor([key]), Database(settings.resolved_database_url, Signals())
    with database.read() as session:
        found = [
            *session.scalars(select(Secret.sealed_value)),
            *session.scalars(select(Registry.sealed_password)),
        ]
    database.dispose()
    return {encryptor.decrypt(sealed) for sealed in found}


def test_a_new_key_takes_over_in_one_start_and_the_old_one_can_go(database_url: str, tmp_path: Path) -> None:
    old, both, new = (_settings(database_url, tmp_path, *keys) for keys in ((OLD,), (NEW, OLD), (NEW,)))
    made = _seal_something(old)
    assert _opened(old, OLD) == {b"s3cret", b"passw0rd"}
    with running(both) as service, service.client as client:
        again = _make_key_once(client)
        assert (again.json(), again.headers["idempotency-replayed"]) == (made, "true")
    assert _opened(new, NEW) == {b"s3cret", b"passw0rd"}
    start_and_end(new)
    with pytest.raises(WrongEncryptionKey):
        start_and_end(old)
