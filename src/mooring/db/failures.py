"""Which errors of the drivers mean that the database is damaged or unavailable, not that there is a bug."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from mooring_client.errors import Unavailable

log = logging.getLogger(__name__)

# What reads and writes raise; `is_unavailable` tells whether the statement or the database is at fault.
DATABASE_ERRORS: Final = (DBAPIError, PoolTimeout)
# Primary result codes of SQLite: the file is damaged, or is no database.
_DAMAGED_FILE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# SQLSTATEs of PostgreSQL: damaged data, a damaged index.
_DAMAGED_DATA: Final = frozenset({"XX001", "XX002"})
_DISK_FULL: Final = "53100"
# A standby, or a server that an operator has made read-only.
READ_ONLY: Final = "25006"


@contextmanager
def as_unavailable() -> Iterator[None]:
    """For clients of a gateway: Unavailable instead of the errors of a driver."""
    try:
        yield
    except DATABASE_ERRORS as error:
        log.warning("the database does not answer a client: %s", error)
        raise Unavailable("the control plane's database does not answer; try again soon") from None


def is_damage(error: BaseException | None) -> bool:
    """Whether the error of a driver says that stored data is damaged."""
    result: Any = getattr(error, "sqlite_errorcode", None)
    if result is not None:
        return result & 0xFF in _DAMAGED_FILE
    return getattr(error, "sqlstate", None) in _DAMAGED_DATA


def is_full(error: BaseException | None) -> bool:
    """Whether the error of a driver says that the database's disk is full."""
    result: Any = getattr(error, "sqlite_errorcode", None)
    if result is not None:
        return bool(result & 0xFF == sqlite3.SQLITE_FULL)
    return getattr(error, "sqlstate", None) == _DISK_FULL


def is_unavailable(error: Exception) -> bool:
    """Whether the database could not execute a correct statement: it does not answer, is too busy, or rejects
    writes.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, PoolTimeout)
    if isinstance(error, OperationalError | InterfaceError):
        # SQLite reports a wrong statement as an operational error too.
        return getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR
    return is_damage(error.orig) or getattr(error.orig, "sqlstate", None) == READ_ONLY
