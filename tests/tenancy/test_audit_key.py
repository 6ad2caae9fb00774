"""The key of the audit log: outside the database, noticed when it is wrong, replaced in two steps."""

import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr
from sqlalchemy import select
from typer.testing import CliRunner

from mooring.cli.main import app
from mooring.control import audit_verify
from mooring.control.audit_keys import KEY_FILE, AuditKeys, WrongAuditKey
from mooring.db.tables import AuditEntry, Base
from mooring.server import open_control_plane
from mooring.settings import Settings
from tests.service import RunningService, running, settings_for
from tests.tenancy.audit_logs import await_links, mooring
from tests.tenancy.tenants import post

OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))


def _settings(database_url: str, folder: Path, *keys: str) -> Settings:
    return settings_for(database_url, folder, audit_keys=SecretStr(",".join(keys)))


def _start_and_end(settings: Settings) -> None:
    open_control_plane(settings).database.dispose()


def test_another_key_is_refused_and_changes_nothing(database_url: str, tmp_path: Path) -> None:
    _start_and_end(_settings(database_url, tmp_path, OLD))
    with pytest.raises(WrongAuditKey, match="MOORING_AUDIT_KEYS"):
        _start_and_end(_settings(database_url, tmp_path, NEW))
    _start_and_end(_settings(database_url, tmp_path, OLD))


@pytest.mark.parametrize("command", ["server", "up"])
def test_the_operator_is_told_how_to_mend_it(tmp_path: Path, command: str) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    _start_and_end(_settings(url, tmp_path, OLD))
    environment = {
        "MOORING_DATABASE_URL": url, "MOORING_DATA_DIR": str(tmp_path), "MOORING_AUDIT_KEYS": NEW,
        "MOORING_PORT": "0",
    }  # fmt: skip
    ended = CliRunner().invoke(app, [command], env=environment)
    assert ended.exit_code == 2
    assert ended.stderr.startswith("MOORING_AUDIT_KEYS: the audit log is signed with another key")
    assert "Traceback" not in ended.stderr
    assert NEW not in ended.output


def test_the_key_file_is_its_owners_alone_and_stays_the_same(tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path / 'mooring.db'}", tmp_path / "data")
    _start_and_end(settings)
    file = tmp_path / "data" / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = file.read_text()
    assert kept != (tmp_path / "data" / "encryption.key").read_text()
    _start_and_end(settings)
    assert file.read_text() == kept
    file.unlink()
    with pytest.raises(WrongAuditKey, match=KEY_FILE):
        _start_and_end(settings)


def test_the_key_is_not_in_the_database(service: RunningService) -> None:
    key = (service.plane.settings.data_dir / KEY_FILE).read_text().strip()
    with service.plane.database.read() as session:
        stored = [str(session.execute(select(table)).all()) for table in Base.metadata.tables.values()]
    assert service.plane.audit_keys.newest_id in "".join(stored)
    assert key not in "".join(stored)


def _problems(settings: Settings, *keys: str) -> list[str]:
    plane = open_control_plane(settings)
    try:
        with plane.database.read() as session:
            return audit_verify.verify(session, AuditKeys(keys)).problems
    finally:
        plane.database.dispose()


def test_a_new_key_takes_over_and_the_log_verifies_with_both(database_url: str, tmp_path: Path) -> None:
    for number, keys in enumerate(((OLD,), (NEW, OLD))):
        with (
            running(_settings(database_url, tmp_path, *keys)) as service,
            service.client as client,
        ):
            post(client, "/v1/users", name=f"user-{number}")
            await_links(service)
    both = _settings(database_url, tmp_path, NEW, OLD)
    assert _problems(both, NEW, OLD) == []
    assert any("signed with a key that is not here" in problem for problem in _problems(both, NEW))
    plane = open_control_plane(both)
    with plane.database.read() as session:
        recorded = session.scalars(select(AuditEntry).where(AuditEntry.action == "audit.key")).all()
    plane.database.dispose()
    old, new = AuditKeys([OLD]).newest_id, AuditKeys([NEW]).newest_id
    assert [(row.before, row.after) for row in recorded] == [
        (None, {"key": old, "unkeyed_rows": 0, "unkeyed_head": "0" * 64}),
        ({"key": old}, {"key": new}),
    ]


def test_a_replica_may_know_the_new_key_before_it_is_used(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mooring.db'}"
    for keys in ((OLD,), (OLD, NEW), (OLD,)):
        _start_and_end(_settings(url, tmp_path, *keys))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("command", [("audit", "verify"), ("join-token",)])
def test_commands_without_the_servers_key_say_so_and_make_none(
    service: RunningService, tmp_path: Path, command: tuple[str, ...]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for settings in ({}, {"MOORING_AUDIT_KEYS": NEW}):
        told: Any = mooring(service, *command, MOORING_DATA_DIR=str(elsewhere), **settings)
        assert told.exit_code == 2
        assert "MOORING_AUDIT_KEYS: the audit log is signed with the key" in told.output
        assert not (elsewhere / KEY_FILE).exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_command_on_the_host_signs_what_it_records(service: RunningService) -> None:
    assert mooring(service, "join-token").exit_code == 0
    await_links(service)
    told = mooring(service, "audit", "verify")
    assert (told.exit_code, told.output.split()[0]) == (0, "2"), told.output
