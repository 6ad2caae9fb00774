"""Backup and restore of a PostgreSQL database: all or nothing, and not under a running server."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from mooring.db import postgresql_backup, serving
from mooring.db.operator_errors import DatabaseInUse, DatabaseProblem, UnfitBackup
from mooring.db.session import normalized
from mooring.server import open_control_plane
from tests.service import settings_for
from tests.testbed.fixtures import NewPostgresCluster
from tests.testbed.postgres import PASSWORD, PostgresCluster


def no_progress(_done: int) -> None: ...


@pytest.fixture
def url(database_url: str, tmp_path: Path) -> Iterator[str]:
    """A database of a server, with the project `then`."""
    open_control_plane(settings_for(database_url, tmp_path / "data")).database.dispose()
    execute(database_url, "UPDATE projects SET name = 'then'")
    yield database_url


pytestmark = [
    pytest.mark.both_databases,
    pytest.mark.parametrize("database_url", ["postgresql"], indirect=True),
]


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def project_names(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [str(row[0]) for row in connection.execute("SELECT name FROM projects ORDER BY name")]


def backup_of(url: str, folder: Path) -> Path:
    """A backup with the project `then`. Afterwards the database has `now` instead."""
    file = folder / "mooring.backup"
    postgresql_backup.backup(normalized(url), file, no_progress)
    execute(url, "UPDATE projects SET name = 'now'")
    return file


def test_a_restore_replaces_all_rows(url: str, tmp_path: Path) -> None:
    file = backup_of(url, tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert PASSWORD.encode() not in file.read_bytes()
    postgresql_backup.restore(file, normalized(url), no_progress)
    assert project_names(url) == ["then"]
    # Also into an empty database, as on a new machine.
    execute(url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    postgresql_backup.restore(file, normalized(url), no_progress)
    assert project_names(url) == ["then"]


def test_a_restore_that_fails_changes_nothing(url: str, tmp_path: Path) -> None:
    file = backup_of(url, tmp_path)
    # A view of another program prevents that the tables are removed.
    execute(url, "CREATE SCHEMA other", "CREATE VIEW other.names AS SELECT name FROM public.projects")
    with pytest.raises(DatabaseProblem, match=r"psql failed with status 3: .*other objects depend on them"):
        postgresql_backup.restore(file, normalized(url), no_progress)
    assert project_names(url) == ["now"]


def test_a_truncated_backup_changes_nothing(url: str, tmp_path: Path) -> None:
    file = backup_of(url, tmp_path)
    content = file.read_bytes()
    for size in (100, len(content) // 2, len(content) - 200):
        file.write_bytes(content[:size])
        with pytest.raises(DatabaseProblem):
            postgresql_backup.restore(file, normalized(url), no_progress)
        assert project_names(url) == ["now"]


def test_a_database_in_use_is_not_replaced(url: str, tmp_path: Path) -> None:
    file = backup_of(url, tmp_path)
    with psycopg.connect(url, autocommit=True) as server:
        serving.begin(server, None)
        with pytest.raises(DatabaseInUse, match="stop all servers first"):
            postgresql_backup.restore(file, normalized(url), no_progress)
    assert project_names(url) == ["now"]


def test_no_server_starts_during_a_restore(url: str, tmp_path: Path) -> None:
    tried = []

    def start(_done: int) -> None:
        with pytest.raises(DatabaseInUse, match="being restored"):
            serving.require_no_restore(normalized(url))
        tried.append(True)

    postgresql_backup.restore(backup_of(url, tmp_path), normalized(url), start)
    assert tried
    serving.require_no_restore(normalized(url))


def test_a_server_notices_another_history(url: str, tmp_path: Path) -> None:
    file = backup_of(url, tmp_path)
    with psycopg.connect(url, autocommit=True) as server:
        known = serving.begin(server, None)
    with psycopg.connect(url, autocommit=True) as server:
        assert serving.begin(server, known) == known
    postgresql_backup.restore(file, normalized(url), no_progress)
    with (
        psycopg.connect(url, autocommit=True) as server,
        pytest.raises(DatabaseProblem, match="this server must start again"),
    ):
        serving.begin(server, known)


def test_tables_of_other_programs_are_not_removed(url: str, tmp_path: Path) -> None:
    file = backup_of(url, tmp_path)
    execute(url, "CREATE TABLE invoices (id int)")
    with pytest.raises(DatabaseProblem, match="does not know \\(invoices\\): restore into an empty database"):
        postgresql_backup.restore(file, normalized(url), no_progress)
    assert project_names(url) == ["now"]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "has the revision 9999 of a newer release"),
        ("DROP TABLE control_plane", "is no backup of a database of Mooring"),
    ],
)
def test_an_unfit_backup_is_refused(url: str, tmp_path: Path, statement: str, message: str) -> None:
    execute(url, statement)
    file = backup_of(url, tmp_path)
    with pytest.raises(UnfitBackup, match=message):
        postgresql_backup.restore(file, normalized(url), no_progress)
    file.write_text("#!/bin/sh\n")
    with pytest.raises(UnfitBackup, match="cannot be read: pg_restore failed"):
        postgresql_backup.restore(file, normalized(url), no_progress)
    assert project_names(url) == ["now"]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (None, "pg_dump is not installed: install PostgreSQL's client programs"),
        ("pg_dump (PostgreSQL) 9.6.1", r"pg_dump is too old \(pg_dump \(PostgreSQL\) 9\.6\.1\)"),
    ],
)
def test_the_programs_must_fit(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str | None, message: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    if printed:
        (programs / "pg_dump").write_text(f"#!/bin/sh\necho '{printed}'\n")
        (programs / "pg_dump").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(DatabaseProblem, match=message):
        postgresql_backup.backup(normalized(url), tmp_path / "a.backup", no_progress)
    assert not list(tmp_path.glob("a.backup*"))


def test_no_argument_has_the_password(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine can read the arguments of processes."""
    seen = tmp_path / "arguments"
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("pg_dump", "pg_restore", "psql"):
        script = programs / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {seen}\nexec {shutil.which(name)} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    postgresql_backup.restore(backup_of(url, tmp_path), normalized(url), no_progress)
    arguments = seen.read_text()
    assert all(name in arguments for name in ("pg_dump", "pg_restore", "psql"))
    assert PASSWORD not in arguments.replace(str(tmp_path), "")


def test_a_backup_needs_a_server(new_postgres_cluster: NewPostgresCluster, tmp_path: Path, url: str) -> None:
    cluster: PostgresCluster = new_postgres_cluster(durable=False)
    cluster.kill()
    with pytest.raises(DatabaseProblem, match="cannot reach the database"):
        postgresql_backup.backup(normalized(cluster.url()), tmp_path / "a.backup", no_progress)
    with pytest.raises(DatabaseProblem, match="cannot reach the database"):
        postgresql_backup.restore(backup_of(url, tmp_path), normalized(cluster.url()), no_progress)
