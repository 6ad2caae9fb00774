"""Pending instances become scheduled ones: read the world, decide, write down what still holds."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mooring.control import placement, quotas
from mooring.db.session import Database
from mooring.loops.loop import Loop
from mooring.scheduler.model import Placement, Plan, Snapshot
from mooring.scheduler.schedule import schedule

Item = TypeVar("Item")
# Written in one transaction: enough to share its fsync, few enough to let others write.
_BATCH = 64
# All that wait are looked at this often even if nothing said that something became free.
_LOOK_AT_ALL_S = 30.0


class Scheduling(Loop):
    """`queue` fires when something new waits, `schedule` when something may have become free.

    An arrival frees nothing, so only arrivals are looked at then: a thousand that wait already cost nothing.
    All are looked at again when something became free, and now and then regardless.
    """

    topics = ("queue", "schedule")
    interval_s = 5.0

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._freed = threading.Event()
        self._looked_at_all_at = float("-inf")

    def _run(self) -> None:
        with self.database.signals.waking(self._freed, "schedule"):
            super()._run()

    def tick(self) -> None:
        plan = self._plan()
        for batch in _batches(plan.placements):
            self._place(batch)
        for waiting in _batches(plan.unplaced):
            with self.database.write() as session:
                placement.explain_unplaced(session, waiting)

    def _plan(self) -> Plan:
        all_of_them = self._freed.is_set() or time.monotonic() - self._looked_at_all_at > _LOOK_AT_ALL_S
        if all_of_them:
            self._freed.clear()  # before the look: what is freed during it is looked at next time
            self._looked_at_all_at = time.monotonic()
        with self.database.read() as session:
            requests = placement.pending(session, *(() if all_of_them else (placement.NEVER_LOOKED_AT,)))
            if not requests:
                return Plan((), ())
            nodes = placement.node_views(session)
            limited = quotas.of_projects(session, {request.project_id for request in requests})
        return schedule(Snapshot(nodes, requests, limited))

    def _place(self, placements: Sequence[Placement]) -> None:
        with self.database.write() as session:
            placed = placement.assign(session, placements)
        if len(placed) < len(placements):
            # The world was another by then. What was refused is decided anew.
            self._freed.set()
            self.wake()


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
