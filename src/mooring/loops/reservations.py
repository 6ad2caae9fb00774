"""Replaces reserved GPUs that are lost or quarantined."""

from mooring.control.scheduling import reservations
from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.access import SYSTEM
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.loops.loop import Loop


class ReservationRepair(Loop):
    topics = (Topic.GPU_HEALTH,)
    interval_s = 10.0

    def __init__(self, database: Database, cache: SchedulerCache) -> None:
        super().__init__(database)
        self._cache = cache

    def tick(self) -> None:
        with self.database.read() as session:
            incomplete = reservations.with_unusable_gpus(session)
        self.each(incomplete, lambda session, each: reservations.repair(session, SYSTEM, self._cache, each))
