"""Records the rejected requests of the last minute in the audit log."""

from mooring.control.audit import refusals
from mooring.control.audit.refusals import RejectedRequests
from mooring.db.session import Database
from mooring.loops.loop import Loop

RECORD_EVERY_S = 60.0


class RefusedRequests(Loop):
    def __init__(self, database: Database, counted: RejectedRequests) -> None:
        super().__init__(database)
        self.interval_s = RECORD_EVERY_S
        self._counted = counted

    def tick(self) -> None:
        if refused := self._counted.take():
            with self.database.write() as session:
                refusals.record(session, refused)

    def stop(self) -> None:
        super().stop()
        self.tick()
