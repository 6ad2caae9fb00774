"""PostgreSQL: one replica leads. It does at once what one replica is enough for; the others do it later.

This only saves work. No replica relies on being the only one: a leader that stands still keeps its lock, and
the others then do its work, a second later.
"""

from typing import Any, Final, LiteralString

import psycopg

# On the connection of the listener, so the lock is free as soon as the leader's process or machine is gone.
_TAKE: Final[LiteralString] = "SELECT pg_try_advisory_lock(hashtext('mooring.leading'))"


def take(connection: psycopg.Connection[Any]) -> bool:
    """Lead the replicas until the connection ends. Returns False if another one leads."""
    return connection.execute(_TAKE).fetchone() == (True,)
