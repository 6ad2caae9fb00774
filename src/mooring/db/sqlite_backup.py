"""SQLite: a backup while the server runs, a restore that may be interrupted anywhere, and a check of a file.

A restore moves files in this order, so that the next one can complete it after a crash at any step. While
`.restoring` exists, nothing opens or creates the database (file_lock.py):

    1. the backup is copied to mooring.db.copy and checked there
    2. mooring.db.copy        -> mooring.db.restoring
    3. mooring.db, -wal, -shm -> mooring.db.replaced-20261124T080000Z/
    4. mooring.db.restoring   -> mooring.db

An old `-wal` beside a new database would be replayed into it and damage it.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from mooring.db import file_lock, migrate, restored_events
from mooring.db.file_lock import DATABASE_SUFFIXES, RESTORING_SUFFIX, beside, give_owner_of
from mooring.db.operator_errors import DamagedDatabase, DatabaseProblem, UnfitBackup
from mooring.db.types import now

log = logging.getLogger(__name__)

# Limit for the check at the start of a server. 1 GiB took 0.6 s from memory and 2.5 s from the disk.
CHECK_LIMIT_S: Final = 5.0
_INTERRUPT_EVERY_S: Final = 0.001
_CHUNK: Final = 1 << 20
_PAGES_PER_STEP: Final = 1000
_COPY_SUFFIX: Final = ".copy"
_MAX_SHOWN: Final = 3

T = TypeVar("T")
# Called with the bytes copied so far, and with all bytes.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did. `replaced` has the old files; None: there were none."""

    revision: str
    replaced: Path | None


def require_undamaged(path: Path, limit_s: float = CHECK_LIMIT_S) -> None:
    """Check the structure of a database file, for a limited time. Call it before this process opens the file.

    Raises:
        DamagedDatabase: the file is damaged, or is no database.
        sqlite3.OperationalError: cannot read the file.
    """
    until = time.monotonic() + limit_s
    _read_ahead(path, until)
    try:
        with (
            closing(sqlite3.connect(path, check_same_thread=False)) as connection,
            _interrupted_from(until, connection),
        ):
            problems = _problems(connection)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        log.warning("%s is large: its check was ended after %g s, without a finding", path, limit_s)
        return
    except sqlite3.DatabaseError as error:
        problems = [str(error)]
    if problems:
        raise DamagedDatabase(f"{path} is damaged: {'; '.join(problems)}")


@contextmanager
def _interrupted_from(at: float, connection: sqlite3.Connection) -> Iterator[None]:
    """Interrupt the connection's statements from this monotonic time on."""
    ended = threading.Event()

    def interrupt() -> None:
        ended.wait(at - time.monotonic())
        # An interrupt affects only statements that run, and the first one may come too early.
        while not ended.is_set():
            connection.interrupt()
            ended.wait(_INTERRUPT_EVERY_S)

    thread = threading.Thread(target=interrupt, name="interrupt")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_ahead(path: Path, until: float) -> None:
    """Read the file into the page cache in its order. The check reads in random order: 20 s for 1 GiB."""
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK) and time.monotonic() < until:
            pass


def _problems(connection: sqlite3.Connection) -> list[str]:
    found = [str(row[0]) for row in connection.execute(f"PRAGMA quick_check({_MAX_SHOWN})")]
    return [] if found == ["ok"] else [each.replace("\n", " ") for each in found]


def backup(source: Path, target: Path, progress: Progress) -> None:
    """Copy the database to a file with one consistent state. The server may write meanwhile.

    The file appears under its name only when it is complete, checked and on the disk.

    Raises:
        DamagedDatabase: the copy is damaged, and so is the database.
        DatabaseProblem: a restore is running, or there is no database.
        OSError, sqlite3.Error: cannot write the file.
    """
    _require_other_file(target, source)
    with file_lock.in_use(source):
        if not source.exists():
            raise DatabaseProblem(f"there is no database at {source}")
        copied = beside(target, f".{os.getpid()}.part")
        try:
            _copy(_opened(source, "mode=rw"), copied, progress)
            if problems := _checked(copied, _problems):
                raise DamagedDatabase(f"{source} is damaged: {'; '.join(problems)}")
            copied.replace(target)
        finally:
            copied.unlink(missing_ok=True)
        _sync(target.parent)


def _copy(source: sqlite3.Connection, target: Path, progress: Progress) -> None:
    """Copy a database to a new file without a write-ahead log, and close the connection."""
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(source) as connection, closing(sqlite3.connect(target)) as copy:
        # A snapshot: without it, each write of the server would make the copy begin again.
        connection.execute("BEGIN")
        page_size = int(connection.execute("PRAGMA page_size").fetchone()[0])
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()

        def report(_status: int, left: int, total: int) -> None:
            progress((total - left) * page_size, total * page_size)

        connection.backup(copy, pages=_PAGES_PER_STEP, progress=report)
        copy.execute("PRAGMA journal_mode=DELETE").fetchone()
    _sync(target)


def _opened(path: Path, options: str) -> sqlite3.Connection:
    """A connection with these options of SQLite's URIs. It waits for writers for 30 s."""
    return sqlite3.connect(f"{path.resolve().as_uri()}?{options}", uri=True, isolation_level=None, timeout=30)


def restore(source: Path, target: Path, progress: Progress) -> Restored:
    """Replace the database with a backup. The old files are kept.

    Raises:
        UnfitBackup: the file is damaged, is no database of Mooring, or is of a newer release.
        DatabaseInUse: another process uses the database.
        OSError, sqlite3.Error: cannot read the backup, or write the database.
    """
    _require_other_file(source, target)
    if not source.is_file():
        raise UnfitBackup(f"there is no file {source}")
    with file_lock.only_user(target):
        copied, ready = beside(target, _COPY_SUFFIX), beside(target, RESTORING_SUFFIX)
        try:
            revision = _checked_copy(source, copied, progress)
            give_owner_of(target if target.exists() else target.parent, copied)
            replaced = _folder_for_replaced(target, is_repeated=ready.exists())
            copied.replace(ready)
        finally:
            copied.unlink(missing_ok=True)
        _sync(target.parent)
        _replace(target, ready, replaced)
        if any(replaced.iterdir()):
            return Restored(revision, replaced)
        replaced.rmdir()
        return Restored(revision, None)


def _checked_copy(source: Path, copied: Path, progress: Progress) -> str:
    """Copy the backup. Returns its revision. Raises UnfitBackup."""
    try:
        # Without a log nothing else writes the backup, and it can be read in a folder that is read-only.
        has_log = beside(source, "-wal").exists()
        _copy(_opened(source, "mode=rw" if has_log else "mode=ro&immutable=1"), copied, progress)
        problems = _checked(copied, _problems)
        revision = None if problems else _checked(copied, _revision)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        problems, revision = [str(error)], None
    if problems:
        raise UnfitBackup(f"{source} is damaged: {'; '.join(problems)}")
    if revision is None:
        raise UnfitBackup(f"{source} is no database of Mooring")
    if revision not in migrate.known():
        raise UnfitBackup(f"{source} has the revision {revision} of a newer release; install that release")
    _checked(copied, restored_events.skip_seqs)
    _sync(copied)
    return revision


def _checked(path: Path, read: Callable[[sqlite3.Connection], T]) -> T:
    with closing(sqlite3.connect(path)) as connection:
        return read(connection)


def _revision(connection: sqlite3.Connection) -> str | None:
    """The revision of a database with a control plane in it; None: it is none."""
    try:
        planes = connection.execute("SELECT count(*) FROM control_plane").fetchone()[0]
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError:  # no such table
        return None
    return str(row[0]) if row and planes else None


def _folder_for_replaced(target: Path, *, is_repeated: bool) -> Path:
    """A new folder; that of the interrupted restore that this one repeats: it may have some of the files."""
    made = sorted(target.parent.glob(f"{target.name}.replaced-*"))
    if is_repeated and made:
        return made[-1]
    folder = beside(target, f".replaced-{now():%Y%m%dT%H%M%S.%fZ}")
    folder.mkdir(mode=0o700)
    _sync(target.parent)
    return folder


def _replace(target: Path, ready: Path, replaced: Path) -> None:
    for suffix in DATABASE_SUFFIXES:
        if (old := beside(target, suffix)).exists():
            old.rename(replaced / old.name)
    _sync(replaced)
    _sync(target.parent)
    ready.rename(target)
    _sync(target.parent)


def _require_other_file(backup_file: Path, database: Path) -> None:
    if backup_file.resolve() in {beside(database, suffix).resolve() for suffix in DATABASE_SUFFIXES}:
        raise UnfitBackup(f"{backup_file} is the database itself")


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
