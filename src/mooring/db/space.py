"""Returns the pages of deleted rows to the file system, and keeps the database's files private.

For SQLite only: PostgreSQL's autovacuum makes the space of deleted rows reusable. A new SQLite file has
`auto_vacuum=INCREMENTAL`; a file of an earlier release is rewritten with VACUUM at startup if there is room.
"""

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from mooring.db.file_lock import DATABASE_SUFFIXES, beside, file_of, in_use
from mooring.db.session import Database, normalized

log = logging.getLogger(__name__)

# Free pages that stay in the file for the next rows.
KEPT_PAGES: Final = 256
# Freed in one transaction: 1 MiB, a few milliseconds.
PAGES_PER_TRANSACTION: Final = 256
# A larger file is not rewritten at startup, which would take some seconds per GiB.
MAX_REWRITTEN_BYTES: Final = 1024**3
_INCREMENTAL = 2
# Prefixes of the files that Mooring has in a data directory.
_OWN_PREFIXES = ("mooring", "encryption", "agent", "audit", "clock")


def make_private(folder: Path, url: str) -> None:
    """Make the data directory and an SQLite database's files readable by their owner only.

    The files contain every tenant's env, stored answers and hashes. Existing files get the mode too. SQLite
    creates `-wal` and `-shm` with the mode of the database, whose mode must be set before the first open.

    Raises:
        DatabaseProblem: a restore has begun and not ended, so no file must be created.
        OSError: cannot create a file.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if all(entry.name.startswith(_OWN_PREFIXES) or entry.suffix == ".log" for entry in folder.iterdir()):
        _tighten(folder, 0o700)  # not a shared directory such as /tmp
    if (path := file_of(normalized(url))) is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with in_use(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for suffix in DATABASE_SUFFIXES:
        _tighten(beside(path, suffix), 0o600)


def _tighten(path: Path, mode: int) -> None:
    """Remove all permissions beyond `mode`, or log a warning if another user owns the file."""
    try:
        present = path.stat().st_mode & 0o777
        if present & ~mode:
            path.chmod(present & mode)
    except FileNotFoundError:
        return
    except PermissionError:
        log.warning("%s is readable by others and belongs to another user; make its mode %o", path, mode)


def make_shrinkable(url: str) -> None:
    """Rewrite an SQLite file of an earlier release, if there is room, so that free pages can be returned."""
    path = file_of(normalized(url))
    if path is None:
        return
    with closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as connection:
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL:
            return
        size, free = path.stat().st_size, shutil.disk_usage(path.parent).free
        if size > MAX_REWRITTEN_BYTES or free < 3 * size:
            log.warning(
                "%s does not return the pages of deleted rows to the disk; stop Mooring and run: "
                "sqlite3 %s 'PRAGMA auto_vacuum=INCREMENTAL; VACUUM;' (it needs twice the file's size)",
                path,
                path,
            )
            return
        try:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("VACUUM")
        except sqlite3.OperationalError as error:  # another process has it open; retried at the next start
            log.warning("%s was not rewritten: %s", path, error)


def free_pages(database: Database) -> int:
    """Return up to PAGES_PER_TRANSACTION free pages to the disk; returns how many there were to return."""
    with _exclusive(database) as connection:
        surplus = _pragma(connection, "freelist_count") - KEPT_PAGES
        if surplus <= 0 or _pragma(connection, "auto_vacuum") != _INCREMENTAL:
            return 0
        try:
            # Each step of this statement frees one page, and `execute` does only one step.
            connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, PAGES_PER_TRANSACTION)})")
        except sqlite3.OperationalError:  # another process writes; retried at the next run
            return 0
    return surplus


def truncate_log(database: Database) -> None:
    """Copy the write-ahead log into the database file, and truncate the log unless a reader needs it."""
    with _exclusive(database) as connection:
        # Copies without SQLite's write lock, which TRUNCATE takes, so other processes can write meanwhile.
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextmanager
def _exclusive(database: Database) -> Iterator[sqlite3.Connection]:
    """A connection that does not wait for other processes, with this process's write lock held."""
    with (
        database.only_writer(),
        closing(sqlite3.connect(str(database.url.database), isolation_level=None, timeout=0)) as connection,
    ):
        yield connection


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
