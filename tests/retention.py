"""Retention in tests: one run of the loop on demand."""

from datetime import timedelta

from mooring.control.retention import RetentionTimes
from mooring.control.tenants.storage import StorageLimits
from mooring.loops.retention import Retention
from tests.service import RunningService

DEFAULTS = RetentionTimes(timedelta(days=30), timedelta(hours=24), timedelta(days=30))
# Purges everything that the shortest settings would purge some seconds later.
IMMEDIATE = RetentionTimes(timedelta(0), timedelta(0), timedelta(days=30))
LIMITS = StorageLimits(stored_bytes=1024**3, written_bytes_per_day=2 * 1024**3)


def purge(service: RunningService, kept: RetentionTimes = DEFAULTS, limits: StorageLimits = LIMITS) -> None:
    Retention(service.plane.database, kept, limits).tick()
