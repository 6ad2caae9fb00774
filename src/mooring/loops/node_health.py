"""Marks nodes as unreachable when their heartbeat count stands still, by a monotonic clock."""

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import select

from mooring.control.nodes import nodes
from mooring.db.session import Database
from mooring.db.tables import Node
from mooring.loops.loop import Loop

# With a short timeout, as in tests, a busy machine delays most ticks by more than half of it.
_LEAST_LATENESS_S: Final = 5.0


class NodeHealth(Loop):
    """Compares heartbeat counts, not wall clocks: a clock that jumps would make every node unreachable.

    Only time in which reports could be stored counts as a node's silence. All counts start again

    - when this process starts,
    - after a tick that failed, because the database was unavailable or rejected writes,
    - after a tick that came late, because this process or the database stood still.
    """

    interval_s = 2.0

    def __init__(
        self, database: Database, unreachable_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(database)
        self._unreachable_after_s = unreachable_after_s
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}  # node id -> the count, and since when it is unchanged
        self._ticked_at: float | None = None  # the last tick, if it was completed
        self.interval_s = min(self.interval_s, unreachable_after_s / 4)

    def tick(self) -> None:
        at, last, self._ticked_at = self._clock(), self._ticked_at, None
        if last is None or at - last > max(self._unreachable_after_s / 2, _LEAST_LATENESS_S):
            self._seen = {}
        counts = self._counts()
        unchanged = {key: seen for key, seen in self._seen.items() if counts.get(key) == seen[0]}
        self._seen = {node_id: (count, at) for node_id, count in counts.items()} | unchanged
        if last is None or self._silent_for(at, self._unreachable_after_s / 3):
            self.database.require_writable()
        self.each(self._silent_for(at, self._unreachable_after_s), nodes.mark_unreachable)
        self._ticked_at = at

    def _counts(self) -> dict[str, int]:
        query = select(Node.id, Node.heartbeats).where(Node.deleted_at.is_(None), Node.silent.is_(False))
        with self.database.read() as session:
            return dict(session.execute(query).all())

    def _silent_for(self, at: float, seconds: float) -> list[str]:
        return [node_id for node_id, (_count, since) in self._seen.items() if at - since > seconds]
