"""Marks nodes as unreachable when their heartbeat count stands still, by a monotonic clock."""

import time

from sqlalchemy import select

from mooring.control.nodes import nodes
from mooring.db.session import Database
from mooring.db.tables import Node
from mooring.loops.loop import Loop


class NodeHealth(Loop):
    """Compares heartbeat counts, not wall clocks: a clock that jumps would make every node unreachable.

    The timeout starts when this process first reads a node's present count. After a downtime of the control
    plane every node therefore has the full timeout to report again.
    """

    interval_s = 2.0

    def __init__(self, database: Database, unreachable_after_s: float) -> None:
        super().__init__(database)
        self._unreachable_after_s = unreachable_after_s
        self._seen: dict[str, tuple[int, float]] = {}  # node id -> the count, and since when it is unchanged
        self.interval_s = min(self.interval_s, unreachable_after_s / 4)

    def tick(self) -> None:
        at = time.monotonic()
        query = select(Node.id, Node.heartbeats).where(Node.deleted_at.is_(None), Node.silent.is_(False))
        with self.database.read() as session:
            counts = dict(session.execute(query).all())
        unchanged = {key: seen for key, seen in self._seen.items() if counts.get(key) == seen[0]}
        self._seen = {node_id: (count, at) for node_id, count in counts.items()} | unchanged
        silent = [key for key, (_, since) in self._seen.items() if at - since > self._unreachable_after_s]
        self.each(silent, nodes.mark_unreachable)
