"""Nodes that fall silent: noticed by a count that stands still, on this process's own monotonic clock."""

import time

from sqlalchemy import select

from mooring.control.nodes import nodes
from mooring.db.session import Database
from mooring.db.tables import Node
from mooring.loops.loop import Loop


class NodeHealth(Loop):
    """Comparing wall clocks would declare every node dead when one of them jumps.

    A node's count is first seen when this process starts, so a control plane that was away for an hour
    gives every node its full time to speak again.
    """

    interval_s = 2.0

    def __init__(self, database: Database, unreachable_after_s: float) -> None:
        super().__init__(database)
        self._unreachable_after_s = unreachable_after_s
        self._seen: dict[str, tuple[int, float]] = {}  # node id -> its count, when that was new
        self.interval_s = min(self.interval_s, unreachable_after_s / 4)

    def tick(self) -> None:
        moment = time.monotonic()
        query = select(Node.id, Node.heartbeats).where(Node.deleted_at.is_(None), Node.silent.is_(False))
        with self.database.read() as session:
            counts = dict(session.execute(query).all())
        self._seen = {
            node_id: seen if (seen := self._seen.get(node_id)) and seen[0] == count else (count, moment)
            for node_id, count in counts.items()
        }
        silent = [key for key, (_, since) in self._seen.items() if moment - since > self._unreachable_after_s]
        self.each(silent, nodes.silence)
