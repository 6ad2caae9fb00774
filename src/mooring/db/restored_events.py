"""Numbers of events after a restore: the next event gets a `seq` that no lost event has had.

Otherwise a reader that has seen a lost event would skip new ones without noticing. So it gets an error,
because no event has its `seq` (control/events.py). The next `seq` is the wall clock's time in microseconds,
which is higher than all numbers that were counted up from one, or from an earlier restore. Clients in
JavaScript can represent it until the year 2255.
"""

import sqlite3
import time
from typing import Final

_SQLITE: Final = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'events'"
_POSTGRESQL: Final = "SELECT setval('public.events_seq_seq', greatest(nextval('public.events_seq_seq'), {}))"


def skip_seqs(connection: sqlite3.Connection) -> None:
    connection.isolation_level = None  # commits by itself
    connection.execute(_SQLITE, (_lowest(),))


def postgresql_statement() -> str:
    return _POSTGRESQL.format(_lowest())


def _lowest() -> int:
    return time.time_ns() // 1000
