"""The order of events on PostgreSQL, where transactions append events at the same time.

`seq` is assigned before the commit, so event 8 may be readable while event 7 is not. A reader that continued
after 8 would miss 7. A lock that all writers hold until the commit would prevent that, but then they commit
one after the other, on all replicas together. Instead, writers announce themselves and readers look:

    writer   1. takes a shared lock whose key is the last assigned `seq`   2. inserts its events   3. commits
    reader   1. reads the last assigned `seq`   2. reads these locks   3. reads events, in a new snapshot

At the reader's step 3, every event up to the lower of its two numbers is readable, or never will be: the
`seq` of an event is above the key of its writer's lock. A writer that got a `seq` before the reader's step 1
either still holds its lock at step 2, or has committed before step 3. The locks do not conflict, so nobody
waits.

On SQLite there is one writer at a time, and every committed event is readable.
"""

import math
from typing import Final

from sqlalchemy import text
from sqlalchemy.orm import Session

# The keys of these locks are above this number; those of other advisory locks are 32-bit hashes.
_BASE: Final = 1 << 62
# `pg_sequence_last_value` is null before the first value.
_BEGIN: Final = text(
    "SELECT pg_advisory_xact_lock_shared(:base + coalesce(pg_sequence_last_value('events_seq_seq'), 0))"
)
# Two statements, because the locks must be read after the sequence.
_ASSIGNED: Final = text("SELECT coalesce(pg_sequence_last_value('events_seq_seq'), 0)")
# pg_locks shows the upper and the lower half of a key.
_WRITERS: Final = text(
    """
    SELECT min((classid::bigint << 32 | objid::bigint) - :base) FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock'
        AND classid::bigint BETWEEN :base >> 32 AND (:base >> 31) - 1
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
)


def begin_append(session: Session) -> None:
    """Announce that this transaction will append events. Call it before the first of them is inserted."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_BEGIN, {"base": _BASE})


def complete_to(session: Session) -> float:
    """Up to this `seq`, each event is readable in every later snapshot, or will never be committed."""
    if session.get_bind().dialect.name != "postgresql":
        return math.inf
    assigned: int = session.scalars(_ASSIGNED).one()
    writer: int | None = session.scalars(_WRITERS, {"base": _BASE}).one()
    return assigned if writer is None else min(assigned, writer)
