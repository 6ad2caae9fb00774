"""Stops instances that are past a deadline: the maximum duration, the end of a drain, the start timeout."""

from mooring.control.instances import deadlines
from mooring.db.session import Database
from mooring.loops.loop import Loop


class Deadlines(Loop):
    interval_s = 1.0

    def __init__(self, database: Database, start_timeout_s: int) -> None:
        super().__init__(database)
        self._start_timeout_s = start_timeout_s

    def tick(self) -> None:
        with self.database.read() as session:
            due = deadlines.due(session, self._start_timeout_s)
        self.each(due, lambda session, each: deadlines.stop(session, *each))
