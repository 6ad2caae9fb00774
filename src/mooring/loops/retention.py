"""Purges rows at the end of their retention time, in small batches so that other writers need not wait."""

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from mooring.control import retention
from mooring.control.nodes import gpu_health
from mooring.control.retention import Horizons, RetentionTimes, Sweep
from mooring.control.tenants.storage import StorageLimits
from mooring.db import space
from mooring.db.session import Database
from mooring.loops.loop import Loop

# A batch grows and shrinks so that its transaction takes about this long.
BATCH_S: Final = 0.05
MAX_BATCH_SIZE: Final = 500
_FIRST_BATCH = 20


class Retention(Loop):
    def __init__(self, database: Database, kept: RetentionTimes, limits: StorageLimits) -> None:
        super().__init__(database)
        self._kept, self._limits, self._horizons = kept, limits, Horizons()
        shortest = min(kept.deleted, kept.idempotency).total_seconds()
        self.interval_s = min(retention.INTERVAL_S, max(1.0, shortest / 4))

    def tick(self) -> None:
        failures: list[Exception] = []
        for sweep in retention.sweeps(self._kept, self._limits, self._horizons):
            try:
                self._sweep(sweep)
            except Exception as failure:
                failures.append(failure)
        try:
            with self.database.write() as session:
                gpu_health.delete_expired(session)
        except Exception as failure:
            failures.append(failure)
        if self.database.is_sqlite:
            self._release_space()
        if failures:
            raise ExceptionGroup("some rows were not purged", failures)

    def _sweep(self, sweep: Sweep) -> None:
        batch = _FIRST_BATCH
        while not self._stopping.is_set():
            with self.database.read() as session:
                keys = sweep.find(session, batch)
            if not keys:
                return
            took_s, removed = self._remove(sweep, keys)
            if not removed:
                return  # another replica has locked them; the next run continues
            batch = _next_batch(batch, took_s)
            self.rest(took_s)

    def _remove(self, sweep: Sweep, keys: Sequence[Any]) -> tuple[float, int]:
        with self.database.write() as session:
            began = monotonic()  # excludes the wait for the write lock
            removed = sweep.remove(session, keys)
        return monotonic() - began, removed

    def _release_space(self) -> None:
        has_freed = False
        while not self._stopping.is_set():
            began = monotonic()
            if not space.free_pages(self.database):
                break
            has_freed = True
            self.rest(monotonic() - began)
        if has_freed:
            space.truncate_log(self.database)


def _next_batch(batch: int, took_s: float) -> int:
    if took_s > BATCH_S:
        return max(1, batch // 2)
    return min(MAX_BATCH_SIZE, batch * 2) if took_s < BATCH_S / 3 else batch
