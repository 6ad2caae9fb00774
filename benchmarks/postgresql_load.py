"""What PostgreSQL does while a benchmark runs: its CPU, and what its backends wait for."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil
import psycopg

from benchmarks import stack

SAMPLE_EVERY_S: Final = 0.02
# Of this database's backends other than the sampler's own: what those that work on a statement wait for.
_ACTIVE: Final = """
    SELECT coalesce(wait_event_type || ':' || wait_event, 'CPU') FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'active'
"""
_LOCKS: Final = "SELECT locktype FROM pg_locks WHERE NOT granted"


@dataclass
class PostgresLoad:
    """Counts of samples of active backends, and the CPU of all processes of the server."""

    samples: int = 0
    states: Counter[str] = field(default_factory=Counter)
    locks: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def __str__(self) -> str:
        """For each wait event and each kind of lock, the mean number of backends that waited for it."""
        events = ", ".join(f"{name} {self._mean(count)}" for name, count in self.states.most_common(6))
        locks = ", ".join(f"{name} {self._mean(count)}" for name, count in self.locks.most_common(4))
        return (
            f"active backends, mean of {self.samples} samples: {events or 'none'}; "
            f"lock waits: {locks or 'none'}"
        )

    def _mean(self, count: int) -> str:
        return f"{count / max(1, self.samples):.2f}"


@contextmanager
def observed(url: str) -> Iterator[PostgresLoad]:
    """Sample the server at this URL during the block."""
    load, ended = PostgresLoad(), threading.Event()
    with psycopg.connect(url, autocommit=True) as connection:
        postmaster = psutil.Process(connection.info.backend_pid).ppid()
        before = stack.cpu_seconds(postmaster)
        thread = threading.Thread(target=_sample, args=(connection, load, ended))
        thread.start()
        try:
            yield load
        finally:
            ended.set()
            thread.join()
            load.cpu_s = stack.cpu_seconds(postmaster) - before


def _sample(connection: psycopg.Connection[tuple[str]], load: PostgresLoad, ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_EVERY_S):
        load.samples += 1
        load.states.update(state for (state,) in connection.execute(_ACTIVE))
        load.locks.update(kind for (kind,) in connection.execute(_LOCKS))
