"""Gives the pages of deleted rows back to the file system, and keeps the database's files private.

SQLite only: PostgreSQL's autovacuum marks the space of deleted rows for reuse, and its files are its own.
A new SQLite file has `auto_vacuum=INCREMENTAL`; one of an earlier release is rewritten once, with VACUUM,
when it is opened and there is room for that.
"""

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from mooring.db.session import Database, normalized

log = logging.getLogger(__name__)

# Free pages that stay in the file: the next rows need some.
KEPT_PAGES: Final = 256
# Moved in one transaction: 1 MiB, some milliseconds.
PAGES_AT_ONCE: Final = 256
# A larger file is not rewritten at a start, which would wait for it: some seconds for each GiB.
MOST_REWRITTEN_BYTES: Final = 1024**3
_INCREMENTAL = 2
# What lies in a data directory.
_OWN = ("mooring", "encryption", "agent", "audit")
_FILES = ("", "-wal", "-shm", "-journal")


def file_of(url: str) -> Path | None:
    """The file of an SQLite database; null for any other."""
    parsed = normalized(url)
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database not in {None, "", ":memory:"}
    return Path(str(parsed.database)) if is_file else None


def make_private(folder: Path, url: str) -> None:
    """Make the data directory and an SQLite database's files readable by their owner only.

    They hold every tenant's env, stored answers and hashes. What others could read until now is tightened.
    SQLite gives `-wal` and `-shm` the mode of the database, so it must be right before it is first opened.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if all(entry.name.startswith(_OWN) or entry.suffix == ".log" for entry in folder.iterdir()):
        _tighten(folder, 0o700)  # not a directory that others use too, such as /tmp
    if (path := file_of(url)) is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for suffix in _FILES:
        _tighten(path.with_name(path.name + suffix), 0o600)


def _tighten(path: Path, mode: int) -> None:
    """Take away what others may do, where this process owns the file."""
    try:
        present = path.stat().st_mode & 0o777
        if present & ~mode:
            path.chmod(present & mode)
    except FileNotFoundError:
        return
    except PermissionError:
        log.warning("%s is readable by others and belongs to another user; make its mode %o", path, mode)


def make_shrinkable(url: str) -> None:
    """Rewrite an SQLite file of an earlier release, so that its free pages can be given back."""
    path = file_of(url)
    if path is None:
        return
    with closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as connection:
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL:
            return
        size, free = path.stat().st_size, shutil.disk_usage(path.parent).free
        if size > MOST_REWRITTEN_BYTES or free < 3 * size:
            log.warning(
                "%s keeps the pages of deleted rows for itself; to give them back, stop Mooring and run: "
                "sqlite3 %s 'PRAGMA auto_vacuum=INCREMENTAL; VACUUM;' (it needs twice the file's size)",
                path,
                path,
            )
            return
        try:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("VACUUM")
        except sqlite3.OperationalError as error:  # another process has it open: at the next start
            log.warning("%s was not rewritten: %s", path, error)


def give_back(database: Database) -> int:
    """Give some free pages back, in a short transaction; how many are left that could be."""
    with _alone(database) as connection:
        left = _number(connection, "freelist_count") - KEPT_PAGES
        if left <= 0 or _number(connection, "auto_vacuum") != _INCREMENTAL:
            return 0
        try:
            # A step of this statement frees one page, and `execute` makes but one.
            connection.executescript(f"PRAGMA incremental_vacuum({min(left, PAGES_AT_ONCE)})")
        except sqlite3.OperationalError:  # another process writes: at the next run
            return 0
    return left


def truncate_log(database: Database) -> None:
    """Move what the write-ahead log holds into the file and cut it to nothing, unless somebody reads it."""
    with _alone(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextmanager
def _alone(database: Database) -> Iterator[sqlite3.Connection]:
    """A connection that waits for no other process, while no other thread of this one writes."""
    with (
        database.only_writer(),
        closing(sqlite3.connect(str(database.url.database), isolation_level=None, timeout=0)) as connection,
    ):
        yield connection


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
