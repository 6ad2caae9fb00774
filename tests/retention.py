"""Retention in tests: one run of the loop, whatever the time that the service itself would take."""

from datetime import timedelta

from mooring.control.retention import Kept
from mooring.control.tenants.storage import StorageLimits
from mooring.loops.retention import Retention, SteadyClock
from tests.service import RunningService

AS_SHIPPED = Kept(timedelta(days=30), timedelta(hours=24), timedelta(days=30))
# As with the shortest settings, some seconds later.
AT_ONCE = Kept(timedelta(0), timedelta(0), timedelta(days=30))
LIMITS = StorageLimits(stored_bytes=1024**3, written_bytes_per_day=2 * 1024**3)


class TrustedClock(SteadyClock):
    """For rows that the test has aged."""

    def is_steady(self, last_activity: object) -> bool:
        return True


def purge(service: RunningService, kept: Kept = AS_SHIPPED, limits: StorageLimits = LIMITS) -> None:
    Retention(service.plane.database, kept, limits, TrustedClock()).tick()
