"""Forgets what is kept for a time only: events, idempotency keys, streams nobody came for, GPU warnings."""

from datetime import timedelta

from sqlalchemy import delete

from mooring.control import events, gpu_health, idempotency
from mooring.db.session import Database
from mooring.db.tables import Stream
from mooring.db.types import now
from mooring.loops.loop import Loop

_STREAM_KEPT = timedelta(minutes=10)


class Retention(Loop):
    interval_s = 600.0

    def __init__(self, database: Database, events_kept_days: int) -> None:
        super().__init__(database)
        self._events_kept_days = events_kept_days

    def tick(self) -> None:
        with self.database.write() as session:
            events.forget_older_than(session, self._events_kept_days)
            idempotency.forget_expired(session)
            session.execute(delete(Stream).where(Stream.created_at < now() - _STREAM_KEPT))
        with self.database.write() as session:  # locks nodes, so it begins a transaction of its own
            gpu_health.forget_old(session)
