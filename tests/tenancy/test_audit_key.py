"""The key of the audit log: its storage, its replacement, and its use by commands."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from mooring.control.audit import verification
from mooring.control.audit.signing_keys import KEY_FILE, AuditKeys
from mooring.db.tables import AuditEntry, Base
from mooring.server import open_control_plane
from mooring.settings import Settings
from tests.service import RunningService, running
from tests.tenancy.audit_logs import await_links, mooring
from tests.tenancy.operator_keys import NEW, OLD, settings_with
from tests.tenancy.tenants import post

pytestmark = pytest.mark.both_databases


def _settings(database_url: str, folder: Path, *keys: str) -> Settings:
    return settings_with("audit_keys", keys, database_url, folder)


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
            return verification.verify(session, AuditKeys(keys)).problems
    finally:
        plane.database.dispose()


def test_a_log_with_an_old_and_a_new_key_verifies_with_both(database_url: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("command", [("audit", "verify"), ("join-token",)])
def test_commands_without_the_servers_key_fail_and_create_none(
    service: RunningService, tmp_path: Path, command: tuple[str, ...]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for settings in ({}, {"MOORING_AUDIT_KEYS": NEW}):
        result: Any = mooring(service, *command, MOORING_DATA_DIR=str(elsewhere), **settings)
        assert result.exit_code == 2
        assert "MOORING_AUDIT_KEYS: the audit log is signed with the key" in result.output
        assert not (elsewhere / KEY_FILE).exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_command_on_the_host_signs_what_it_records(service: RunningService) -> None:
    assert mooring(service, "join-token").exit_code == 0
    await_links(service)
    result = mooring(service, "audit", "verify")
    assert (result.exit_code, result.output.split()[0]) == (0, "2"), result.output
