"""An SQLite file releases free pages, and only its owner can read it."""

import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from mooring.db import migrate, space
from mooring.db.session import Database
from mooring.db.signals import Signals
from tests.service import ADMIN_KEY, running, settings_for

pytestmark = pytest.mark.both_databases

MIB = 1024 * 1024
ROWS = 4000  # of 1 KiB each


def fill(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE filling (content BLOB)")
        connection.executemany("INSERT INTO filling VALUES (randomblob(1024))", [()] * ROWS)
        connection.commit()


def empty(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM filling")
        connection.commit()


def auto_vacuum(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA auto_vacuum").fetchone()[0])


def create_as_an_earlier_release(path: Path) -> None:
    """Create a database in WAL mode whose file has no auto_vacuum."""
    migrate.upgrade(f"sqlite:///{path}")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum=NONE")
        connection.execute("VACUUM")
        connection.execute("PRAGMA journal_mode=WAL")
    assert auto_vacuum(path) == 0


@pytest.mark.parametrize("made_by", ["this release", "an earlier one"])
def test_free_pages_are_released_to_the_file_system(tmp_path: Path, made_by: str) -> None:
    path = tmp_path / "mooring.db"
    url = f"sqlite:///{path}"
    if made_by == "this release":
        migrate.upgrade(url)
    else:
        create_as_an_earlier_release(path)
    before = path.stat().st_size
    fill(path)
    space.make_shrinkable(url)
    assert auto_vacuum(path) == 2
    database = Database(url, Signals())
    try:
        with database.read() as session:
            session.execute(text("SELECT count(*) FROM filling"))  # an open connection, as the service has
        assert path.stat().st_size > before + 4 * MIB
        empty(path)
        calls = 0
        while space.free_pages(database):
            calls += 1
        space.truncate_log(database)
        assert path.stat().st_size < before + 2 * MIB
        # Each call is a short transaction that frees about 1 MiB.
        assert ROWS * 1024 / MIB - 1 <= calls <= ROWS * 1024 / MIB + 4
        assert path.with_name("mooring.db-wal").stat().st_size == 0
    finally:
        database.dispose()


def test_a_file_too_large_to_rewrite_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mooring.db"
    create_as_an_earlier_release(path)
    monkeypatch.setattr(space, "MAX_REWRITTEN_BYTES", 1000)
    space.make_shrinkable(f"sqlite:///{path}")
    assert auto_vacuum(path) == 0
    assert "VACUUM" in caplog.text
    database = Database(f"sqlite:///{path}", Signals())
    fill(path)
    empty(path)
    assert space.free_pages(database) == 0  # the file keeps its free pages for new rows
    database.dispose()


def test_a_locked_file_is_rewritten_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "mooring.db"
    create_as_an_earlier_release(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        space.make_shrinkable(f"sqlite:///{path}")
        assert auto_vacuum(path) == 0
        other.execute("ROLLBACK")
    space.make_shrinkable(f"sqlite:///{path}")
    assert auto_vacuum(path) == 2


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("made_by", ["this release", "an earlier one"])
def test_only_the_owner_can_read_the_database(tmp_path: Path, made_by: str) -> None:
    folder = tmp_path / "data"
    files = [folder / f"mooring.db{suffix}" for suffix in ("", "-wal", "-shm")]
    if made_by == "an earlier one":
        folder.mkdir(mode=0o755)
        create_as_an_earlier_release(files[0])
        assert mode(files[0]) == 0o644
        # Like a killed process, an open connection leaves `-wal` and `-shm` behind.
        with closing(sqlite3.connect(files[0])) as left_open:
            left_open.execute("CREATE TABLE unfinished (x)")
            assert mode(files[1]) == 0o644
            space.make_private(folder, f"sqlite:///{files[0]}")
            assert [mode(path) for path in files] == [0o600] * 3
    with running(settings_for(f"sqlite:///{files[0]}", folder)) as service:
        with service.client as client:
            client.create()
        assert [mode(path) for path in files] == [0o600] * 3
        assert mode(folder) == 0o700
    assert mode(folder / "encryption.key") == 0o600


def test_a_shared_directory_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    (folder / "of-another-program").touch()
    space.make_private(folder, f"sqlite:///{folder / 'mooring.db'}")
    assert mode(folder) == 0o755
    assert mode(folder / "mooring.db") == 0o600


def test_commands_create_private_files(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MOORING_")},
        "MOORING_DATA_DIR": str(tmp_path / "data"),
        "MOORING_BOOTSTRAP_ADMIN_KEY": ADMIN_KEY,
    }
    argv = [sys.executable, "-m", "mooring.cli", "db", "upgrade"]
    assert subprocess.run(argv, env=environment, check=False, capture_output=True).returncode == 0
    assert mode(tmp_path / "data") == 0o700
    assert {mode(path) for path in (tmp_path / "data").iterdir()} == {0o600}


def test_postgresql_needs_no_files(tmp_path: Path) -> None:
    url = "postgresql://nobody@127.0.0.1:1/none"
    space.make_private(tmp_path / "data", url)
    assert list((tmp_path / "data").iterdir()) == []
    space.make_shrinkable(url)
