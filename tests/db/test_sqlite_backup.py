"""Backup and restore of an SQLite database: nothing is lost by a refusal or an interruption."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mooring.db import migrate, sqlite_backup
from mooring.db.file_lock import beside
from mooring.db.operator_errors import DamagedDatabase, DatabaseInUse, DatabaseProblem, UnfitBackup
from mooring.db.session import Database
from mooring.db.signals import Signals


def no_progress(_done: int, _total: int) -> None: ...


class Interrupted(BaseException):
    """The end of the process at this step."""


@pytest.fixture
def template(migrated_template: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database with the row of a control plane."""
    path = tmp_path_factory.mktemp("database") / "mooring.db"
    shutil.copy(migrated_template("sqlite").removeprefix("sqlite:///"), path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(
            "INSERT INTO control_plane (id, cursor_secret, created_at) VALUES ('cp', x'00', 0)"
        )
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Iterator[Path]:
    """A database that holds the text "now"; a backup of it can be made by `backup_of`."""
    path = tmp_path / "mooring.db"
    shutil.copy(template, path)
    write(path, "now")
    yield path


def write(path: Path, content: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS said (content TEXT)")
        connection.execute("DELETE FROM said")
        connection.execute("INSERT INTO said VALUES (?)", (content,))
        connection.commit()


def said(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return str(connection.execute("SELECT content FROM said").fetchone()[0])


def backup_of(path: Path, content: str = "then") -> Path:
    write(path, content)
    file = path.with_name("mooring.backup")
    sqlite_backup.backup(path, file, no_progress)
    write(path, "now")
    return file


def damage(path: Path) -> None:
    """Overwrite the pages in the middle of the file."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4)
        file.write(os.urandom(size // 2))


def test_a_backup_has_what_was_committed_while_a_server_writes(path: Path) -> None:
    database = Database(f"sqlite:///{path}", Signals())
    writer = sqlite3.connect(path, isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE said SET content = 'not committed'")
        backup = path.with_name("a.backup")
        sqlite_backup.backup(path, backup, no_progress)
        writer.execute("COMMIT")
    finally:
        writer.close()
        database.dispose()
    assert said(backup) == "now"
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert not beside(backup, "-wal").exists()


def test_a_backup_that_fails_leaves_the_old_one(path: Path) -> None:
    backup = backup_of(path)
    damage(path)
    with pytest.raises((DamagedDatabase, sqlite3.DatabaseError)):
        sqlite_backup.backup(path, backup, no_progress)
    assert said(backup) == "then"
    assert [each.name for each in path.parent.glob("*.part*")] == []


def test_a_restore_keeps_the_old_files_with_their_log(path: Path) -> None:
    backup = backup_of(path)
    killed = path.with_name("killed")
    # The files of a server that was killed: the last commits are only in the log.
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE said SET content = 'only in the log'")
        connection.commit()
        killed.mkdir()
        for file in path.parent.glob("mooring.db*"):
            shutil.copy(file, killed)
    for file in killed.iterdir():
        shutil.copy(file, path.parent)
    assert beside(path, "-wal").stat().st_size

    restored = sqlite_backup.restore(backup, path, no_progress)

    assert (said(path), restored.revision) == ("then", migrate.newest())
    assert restored.replaced is not None
    assert said(restored.replaced / path.name) == "only in the log"
    assert said(backup) == "then"


def test_a_restore_needs_no_old_database(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "mooring.db"
    restored = sqlite_backup.restore(backup_of(path), target, no_progress)
    assert (said(target), restored.replaced) == ("then", None)


@pytest.mark.parametrize("user", ["a server", "another program"])
def test_a_database_in_use_is_not_replaced(path: Path, user: str) -> None:
    backup = backup_of(path)
    database = Database(f"sqlite:///{path}", Signals()) if user == "a server" else None
    reader = None if database else _reading(path)
    try:
        with pytest.raises(DatabaseInUse, match="in use"):
            sqlite_backup.restore(backup, path, no_progress)
    finally:
        if database:
            database.dispose()
        if reader:
            reader()
    assert said(path) == "now"
    assert sqlite_backup.restore(backup, path, no_progress).replaced is not None


def _reading(path: Path) -> Callable[[], None]:
    """Start a process that has read from the database and keeps it open. Returns how to end it."""
    ready, tell = os.pipe()
    wait, end = os.pipe()
    if (child := os.fork()) == 0:
        sqlite3.connect(path).execute("SELECT count(*) FROM said").fetchone()
        os.write(tell, b".")
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)

    def stop() -> None:
        os.write(end, b".")
        os.waitpid(child, 0)
        for descriptor in (ready, tell, wait, end):
            os.close(descriptor)

    return stop


def test_no_server_opens_a_database_during_its_restore(path: Path) -> None:
    tried = []

    def open_it(_done: int, _total: int) -> None:
        with pytest.raises(DatabaseInUse, match="being restored"):
            Database(f"sqlite:///{path}", Signals())
        tried.append(True)

    sqlite_backup.restore(backup_of(path), path, open_it)
    assert tried


@pytest.mark.parametrize("step", range(8))
def test_an_interrupted_restore_is_repeated(path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process ends at the given change of the files. Afterwards the database is whole, or not opened."""
    backup = backup_of(path)
    beside(path, "-journal").touch()
    left = iter(range(step))

    def interruptible(change: Callable[..., Path]) -> Callable[..., Path]:
        def run(*arguments: Path) -> Path:
            if next(left, None) is None:
                raise Interrupted
            return change(*arguments)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interruptible(Path.rename))
        patched.setattr(Path, "replace", interruptible(Path.replace))
        try:
            sqlite_backup.restore(backup, path, no_progress)
        except Interrupted:
            assert path.exists() or beside(path, ".restoring").exists()
            if beside(path, ".restoring").exists():
                with pytest.raises(DamagedDatabase, match="repeat mooring db restore"):
                    Database(f"sqlite:///{path}", Signals())
                with pytest.raises(DamagedDatabase):
                    migrate.upgrade(f"sqlite:///{path}")
            else:
                assert said(path) == "now"
    sqlite_backup.restore(backup, path, no_progress)
    assert said(path) == "then"
    assert not beside(path, ".restoring").exists()
    kept = [file.parent for file in path.parent.glob("mooring.db.replaced-*/mooring.db")]
    assert "now" in {said(folder / "mooring.db") for folder in kept}
    Database(f"sqlite:///{path}", Signals()).dispose()


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        ("damaged", "is damaged"),
        ("no database", "is damaged: file is not a database"),
        ("of another program", "is no database of Mooring"),
        ("empty", "is no database of Mooring"),
        ("of a newer release", "has the revision 9999 of a newer release"),
        ("missing", "there is no file"),
        ("the database itself", "is the database itself"),
    ],
)
def test_an_unfit_backup_is_refused(path: Path, unfit: str, message: str) -> None:
    backup = backup_of(path)
    if unfit == "damaged":
        damage(backup)
    elif unfit == "no database":
        backup.write_text("#!/bin/sh\n" * 500)
    elif unfit == "of another program":
        backup.unlink()
        write(backup, "hello")
    elif unfit == "empty":
        backup.write_bytes(b"")
    elif unfit == "of a newer release":
        with closing(sqlite3.connect(backup, isolation_level=None)) as connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
    elif unfit == "missing":
        backup.unlink()
    else:
        backup = path
    with pytest.raises(UnfitBackup, match=message):
        sqlite_backup.restore(backup, path, no_progress)
    assert said(path) == "now"
    assert not list(path.parent.glob("mooring.db.[!lw]*"))


def test_a_restored_database_belongs_to_the_owner_of_the_old_one(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    backup = backup_of(path)
    os.chown(path, 12345, 12345)
    sqlite_backup.restore(backup, path, no_progress)
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (12345, 0o600)


def test_there_must_be_a_database_to_back_up(tmp_path: Path) -> None:
    with pytest.raises(DatabaseProblem, match="there is no database"):
        sqlite_backup.backup(tmp_path / "mooring.db", tmp_path / "a.backup", no_progress)
    assert not (tmp_path / "mooring.db").exists()


def test_damage_is_found_at_the_start(path: Path) -> None:
    sqlite_backup.require_undamaged(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(path)
    with pytest.raises(DamagedDatabase, match=r"mooring\.db is damaged: "):
        sqlite_backup.require_undamaged(path)


def test_the_check_at_the_start_is_limited(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE filling (content BLOB)")
        connection.executemany("INSERT INTO filling VALUES (randomblob(1024))", [()] * 60_000)
        connection.commit()
    sqlite_backup.require_undamaged(path, limit_s=0)
    assert "is large: its check was ended after 0 s" in caplog.text
