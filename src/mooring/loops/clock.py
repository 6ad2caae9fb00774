"""Keeps the service clock near the wall clock: see `db/clock.py`."""

from pathlib import Path

from mooring.db import timekeeping
from mooring.db.session import Database
from mooring.loops.loop import Loop


class ClockComparison(Loop):
    interval_s = 10.0

    def __init__(self, database: Database, folder: Path) -> None:
        super().__init__(database)
        self._folder = folder

    def tick(self) -> None:
        timekeeping.check(self.database, self._folder)
