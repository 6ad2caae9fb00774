"""PostgreSQL: a restore and the servers exclude each other, and a server notices another history.

Each server holds a shared advisory lock on the connection of its listener (notifications.py), a restore the
exclusive one. The connection may be lost, so the server also remembers which history it serves: a restore
makes new tables, and a standby that becomes the primary begins a new timeline and may lack the last commits.
What the server has cached is then wrong.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from sqlalchemy.engine import URL

from mooring.db.operator_errors import DatabaseInUse, DatabaseProblem
from mooring.db.postgresql import CONNECT_TIMEOUT_S, libpq_parameters

KEY: Final[LiteralString] = "hashtext('mooring.serving')"
_TABLE: Final = "SELECT coalesce(to_regclass('public.control_plane')::oid::bigint, 0)"
# The first eight digits of a file name of the write-ahead log. Some managed services do not allow the call.
_TIMELINE: Final = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)"


@dataclass(frozen=True, slots=True)
class History:
    """Differs for two databases, or two states of one, of which neither is the continuation of the other."""

    table: int
    timeline: str | None


def begin(connection: psycopg.Connection[Any], known: History | None) -> History:
    """Lock against a restore until the connection ends.

    Args:
        connection: in autocommit mode.
        known: the history that this server has served; None: none yet.

    Raises:
        DatabaseInUse: the database is being restored.
        DatabaseProblem: it has another history than the known one.
    """
    if not _answer(connection, f"SELECT pg_try_advisory_lock_shared({KEY})"):
        raise DatabaseInUse("the database is being restored: try again later")
    timeline = None
    with suppress(psycopg.DatabaseError):
        timeline = str(_answer(connection, _TIMELINE))
    found = History(int(_answer(connection, _TABLE)), timeline)
    if known is not None and found != known:
        raise DatabaseProblem("the database was restored or failed over: this server must start again")
    return found


def require_no_restore(url: URL) -> None:
    """Raises DatabaseProblem: the database is being restored, or cannot be reached."""
    parameters = libpq_parameters(url) | {"connect_timeout": CONNECT_TIMEOUT_S, "autocommit": True}
    try:
        with psycopg.connect(**parameters) as connection:
            begin(connection, None)
    except psycopg.OperationalError as error:
        raise DatabaseProblem(f"cannot reach the database: {error}") from None


def _answer(connection: psycopg.Connection[Any], query: LiteralString) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]
