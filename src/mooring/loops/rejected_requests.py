"""Records the rejected requests of the last minute in the audit log, also at the end of the process."""

from mooring.control.audit import rejected_requests
from mooring.control.audit.rejected_requests import RejectedRequests
from mooring.db.session import Database
from mooring.loops.loop import Loop

RECORD_EVERY_S = 60.0


class RejectionAudit(Loop):
    def __init__(self, database: Database, counted: RejectedRequests) -> None:
        super().__init__(database)
        self.interval_s = RECORD_EVERY_S
        self._counted = counted

    def tick(self) -> None:
        if rejected := self._counted.take():
            with self.database.write() as session:
                rejected_requests.record(session, rejected)

    def stop(self) -> None:
        super().stop()
        self.tick()
