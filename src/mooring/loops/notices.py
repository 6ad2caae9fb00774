"""Appends the events that nothing else causes: instances that end soon, and quotas that are nearly used."""

from mooring.control import notices
from mooring.db.session import Database
from mooring.loops.loop import Loop

# Sums of GPU-hours take longer than the rest, and nobody needs them sooner.
_QUOTAS_EVERY = 6


class Notices(Loop):
    """Every replica does this; what was announced is stored with the event."""

    interval_s = 5.0

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._ticks = 0

    def tick(self) -> None:
        with self.database.read() as session:
            expiring = notices.expiring(session)
            changed = notices.changed_quotas(session) if self._ticks % _QUOTAS_EVERY == 0 else []
        self.each(expiring, notices.announce_expiry)
        self.each(changed, notices.announce_quotas)
        self._ticks += 1
