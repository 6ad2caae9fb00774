"""Purges rows at the end of their retention time, in small batches so that other writers need not wait."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from typing import Any, Final

from mooring.control import retention
from mooring.control.nodes import gpu_health
from mooring.control.retention import RetentionTimes, Sweep
from mooring.control.tenants.storage import StorageLimits
from mooring.db import space
from mooring.db.session import Database
from mooring.db.types import now
from mooring.loops.loop import Loop

log = logging.getLogger(__name__)

# Rows that one run of a sweep purges at most; the next run continues.
MAX_PER_RUN: Final = 20_000
# A batch grows and shrinks so that its transaction takes about this long.
BATCH_S: Final = 0.05
MAX_BATCH_SIZE: Final = 500
_FIRST_BATCH = 20


class SteadyClock:
    """Compares the wall clock with a clock that nobody can set.

    Rows are purged by the times in them, so a clock that jumps to the future would purge all of them. After a
    jump nothing is purged until the clock has run evenly for an hour.
    """

    TOLERANCE: Final = timedelta(minutes=5)
    HOLD_S: Final = 3600.0
    # At the first check, a longer time since the newest row counts as a jump.
    LONGEST_ABSENCE: Final = timedelta(days=2)

    def __init__(self, wall: Callable[[], datetime] = now, steady: Callable[[], float] | None = None) -> None:
        self._wall = wall
        # Like the wall clock, it continues while the machine is suspended.
        self._steady = steady or (lambda: clock_gettime(CLOCK_BOOTTIME))
        self._seen: tuple[datetime, float] | None = None
        self._held_until = 0.0

    def is_steady(self, last_activity: datetime | None) -> bool:
        """Whether rows may be purged by the wall clock now.

        Args:
            last_activity: the newest time in the database; only used by the first call.
        """
        wall, steady = self._wall(), self._steady()
        if self._seen is None:
            jumped = last_activity is not None and wall - last_activity > self.LONGEST_ABSENCE
        else:
            passed = timedelta(seconds=steady - self._seen[1])
            jumped = abs(wall - self._seen[0] - passed) > self.TOLERANCE
        self._seen = wall, steady
        if jumped:
            self._held_until = steady + self.HOLD_S
            log.warning(
                "the clock has jumped to %s; nothing is purged for %d minutes",
                wall.isoformat(timespec="seconds"),
                self.HOLD_S / 60,
            )
        return steady >= self._held_until


class Retention(Loop):
    interval_s = 600.0

    def __init__(
        self,
        database: Database,
        kept: RetentionTimes,
        limits: StorageLimits,
        clock: SteadyClock | None = None,
    ) -> None:
        super().__init__(database)
        self._kept, self._limits, self._clock = kept, limits, clock or SteadyClock()
        shortest = min(kept.deleted, kept.idempotency).total_seconds()
        self.interval_s = min(600.0, max(1.0, shortest / 4))

    def tick(self) -> None:
        with self.database.read() as session:
            last_activity = retention.last_activity(session)
        if not self._clock.is_steady(last_activity):
            return
        failures: list[Exception] = []
        for sweep in retention.sweeps(self._kept, self._limits):
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
        left, batch = MAX_PER_RUN, _FIRST_BATCH
        while left > 0 and not self._stopping.is_set():
            with self.database.read() as session:
                keys = sweep.find(session, min(batch, left))
            if not keys:
                return
            took_s, removed = self._remove(sweep, keys)
            if not removed:
                return  # another replica has locked them; the next run continues
            left -= len(keys)
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
