"""The operator's encryption key: refused when it is another, replaced in two steps, readable by one only."""

import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr
from sqlalchemy import select
from typer.testing import CliRunner

from mooring.cli.main import app
from mooring.control.sealing import KEY_FILE, Sealer, WrongEncryptionKey
from mooring.db.session import Database
from mooring.db.signals import Signals
from mooring.db.tables import Registry, Secret
from mooring.server import open_control_plane
from mooring.settings import Settings
from tests.service import running, settings_for
from tests.tenancy.tenants import post

OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))


def _settings(database_url: str, folder: Path, *keys: str) -> Settings:
    return settings_for(database_url, folder, encryption_keys=SecretStr(",".join(keys)))


def _start_and_end(settings: Settings) -> None:
    open_control_plane(settings).database.dispose()


def test_another_key_is_refused_and_changes_nothing(database_url: str, tmp_path: Path) -> None:
    _start_and_end(_settings(database_url, tmp_path, OLD))
    with pytest.raises(WrongEncryptionKey, match="MOORING_ENCRYPTION_KEYS"):
        _start_and_end(_settings(database_url, tmp_path, NEW))
    _start_and_end(_settings(database_url, tmp_path, OLD))


@pytest.mark.parametrize("command", ["server", "up"])
def test_the_operator_is_told_how_to_mend_it(tmp_path: Path, command: str) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    _start_and_end(_settings(url, tmp_path, OLD))
    environment = {
        "MOORING_DATABASE_URL": url, "MOORING_DATA_DIR": str(tmp_path), "MOORING_ENCRYPTION_KEYS": NEW,
        "MOORING_PORT": "0",
    }  # fmt: skip
    ended = CliRunner().invoke(app, [command], env=environment)
    assert ended.exit_code == 2
    assert ended.stderr.startswith("MOORING_ENCRYPTION_KEYS: the encryption key is not the one")
    assert "Traceback" not in ended.stderr
    assert NEW not in ended.output


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
    sealer, database = Sealer([key]), Database(settings.resolved_database_url, Signals())
    with database.read() as session:
        found = [
            *session.scalars(select(Secret.sealed_value)),
            *session.scalars(select(Registry.sealed_password)),
        ]
    database.dispose()
    return {sealer.open(sealed) for sealed in found}


def test_a_new_key_takes_over_in_one_start_and_the_old_one_can_go(database_url: str, tmp_path: Path) -> None:
    old, both, new = (_settings(database_url, tmp_path, *keys) for keys in ((OLD,), (NEW, OLD), (NEW,)))
    made = _seal_something(old)
    assert _opened(old, OLD) == {b"s3cret", b"passw0rd"}
    with running(both) as service, service.client as client:
        again = _make_key_once(client)
        assert (again.json(), again.headers["idempotency-replayed"]) == (made, "true")
    assert _opened(new, NEW) == {b"s3cret", b"passw0rd"}
    _start_and_end(new)
    with pytest.raises(WrongEncryptionKey):
        _start_and_end(old)


def test_a_replica_may_know_the_new_key_before_it_is_used(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    for keys in ((OLD,), (OLD, NEW), (OLD,)):
        _start_and_end(_settings(url, tmp_path, *keys))


def test_the_key_file_is_its_owners_alone_and_stays_the_same(tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")
    _start_and_end(settings)
    file = tmp_path / "data" / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = file.read_text()
    _start_and_end(settings)
    assert file.read_text() == kept
    file.unlink()
    with pytest.raises(WrongEncryptionKey, match=KEY_FILE):
        _start_and_end(settings)
