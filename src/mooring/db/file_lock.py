"""Who uses the file of an SQLite database: the lock between its users and a restore.

    mooring.db.lock         locked by every process with the database open, and exclusively by a restore
    mooring.db.restoring    a restore has begun and not ended: the database must not be used, nor created

SQLite has locks of its own, but a restore replaces the file that they are on.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL

from mooring.db.operator_errors import DamagedDatabase, DatabaseInUse

LOCK_SUFFIX: Final = ".lock"
RESTORING_SUFFIX: Final = ".restoring"
# Of the files that SQLite has for one database.
DATABASE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")
# SQLite's: a connection that has read from a file in WAL mode keeps a shared lock on these bytes.
_SHARED_FIRST: Final = 0x40000000 + 2
_SHARED_SIZE: Final = 510


def file_of(url: URL) -> Path | None:
    """The file of an SQLite database; None for any other."""
    is_file = url.get_backend_name() == "sqlite" and url.database not in {None, "", ":memory:"}
    return Path(str(url.database)) if is_file else None


def beside(path: Path, suffix: str) -> Path:
    """The file with this suffix after the database's whole name."""
    return path.with_name(path.name + suffix)


def give_owner_of(model: Path, file: Path) -> None:
    """For commands that root runs: the server, which another user may run, must be able to use the file."""
    owner, present = model.stat(), file.stat()
    if os.geteuid() == 0 and (owner.st_uid, owner.st_gid) != (present.st_uid, present.st_gid):
        os.chown(file, owner.st_uid, owner.st_gid)


class FileLock:
    """A lock on a database file, which the kernel releases when the process ends.

    Raises:
        DatabaseInUse: a restore is running or, for the exclusive lock, another process uses the database.
        DamagedDatabase: a restore has not ended; not raised for the exclusive lock.
        OSError: cannot create the file of the lock.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not the database itself: SQLite's locks would end when this process closes any descriptor of it.
        file = beside(path, LOCK_SUFFIX)
        self._descriptor: int | None = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_owner_of(path.parent, file)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            what = "in use: stop its server first" if exclusive else "being restored: try again later"
            raise DatabaseInUse(f"{path} is {what}") from None
        if not exclusive and beside(path, RESTORING_SUFFIX).exists():
            self.release()
            raise DamagedDatabase(f"a restore of {path} was interrupted: repeat mooring db restore")

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def in_use(path: Path | None) -> Iterator[None]:
    """Within the block, no restore replaces this database file, if any. Raises: as `FileLock`."""
    if path is None:
        yield
        return
    lock = FileLock(path)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def only_user(path: Path) -> Iterator[None]:
    """Within the block, no other process uses the database file.

    Raises:
        DatabaseInUse: another process uses it, perhaps a program that does not know this lock.
    """
    lock = FileLock(path, exclusive=True)
    try:
        with ExitStack() as stack:
            if path.exists():
                _lock_as_sqlite(stack, path)
            yield
    finally:
        lock.release()


def _lock_as_sqlite(stack: ExitStack, path: Path) -> None:
    """Take SQLite's exclusive lock, against a server of an earlier release and against sqlite3."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _SHARED_SIZE, _SHARED_FIRST)
    except BlockingIOError:
        raise DatabaseInUse(f"{path} is in use by another program: stop it first") from None
