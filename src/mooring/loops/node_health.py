"""Marks nodes as unreachable when their heartbeat count stands still, and replaces what runs on lost ones.

By a monotonic clock.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from mooring.control.nodes import node_loss, nodes
from mooring.control.nodes.node_loss import SilentNode
from mooring.core.node_loss import is_outage
from mooring.db.session import Database
from mooring.db.tables import Node
from mooring.loops.fencing import Fencing
from mooring.loops.loop import Loop

log = logging.getLogger(__name__)

# With a short timeout, as in tests, a busy machine delays most ticks by more than half of it.
_LEAST_LATENESS_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node's count, and since when it is unchanged."""

    count: int
    since: float
    silent: bool


class NodeHealth(Loop):
    """Compares heartbeat counts, not wall clocks: a clock that jumps would make every node unreachable.

    Only time in which reports could be stored counts as a node's silence. All counts start again

    - when this process starts,
    - after a tick that failed, because the database was unavailable or rejected writes,
    - after a tick that came late, because this process or the database stood still.

    Args:
        lost_after_s: after this silence, the instances of a node that are to be replaced are.
        fencing: the operator's fence command; None: nodes fence themselves.
    """

    interval_s = 2.0

    def __init__(
        self,
        database: Database,
        unreachable_after_s: float,
        lost_after_s: float,
        fencing: Fencing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(database)
        self._unreachable_after_s, self._lost_after_s = unreachable_after_s, lost_after_s
        self._fencing = fencing
        self._clock = clock
        self._seen: dict[str, _Seen] = {}  # by node id
        self._ticked_at: float | None = None  # the last tick, if it was completed
        self.interval_s = min(self.interval_s, unreachable_after_s / 4)

    def tick(self) -> None:
        at, last, self._ticked_at = self._clock(), self._ticked_at, None
        if last is None or at - last > max(self._unreachable_after_s / 2, _LEAST_LATENESS_S):
            self._seen = {}
        self._look(at)
        if last is None or self._quiet_for(at, self._unreachable_after_s / 3):
            self.database.require_writable()
        self.each(self._quiet_for(at, self._unreachable_after_s), nodes.mark_unreachable)
        self._replace_lost(at)
        self._ticked_at = at

    def _look(self, at: float) -> None:
        query = select(Node.id, Node.heartbeats, Node.silent).where(Node.deleted_at.is_(None))
        with self.database.read() as session:
            rows = session.execute(query).all()
        seen, self._seen = self._seen, {}
        for node_id, count, silent in rows:
            before = seen.get(node_id)
            since = before.since if before is not None and before.count == count else at
            self._seen[node_id] = _Seen(count, since, silent)

    def _quiet_for(self, at: float, seconds: float) -> list[str]:
        """The nodes with this silence that are not yet marked as silent."""
        return [key for key, seen in self._seen.items() if not seen.silent and at - seen.since > seconds]

    # --- lost nodes

    def _replace_lost(self, at: float) -> None:
        since = {
            key: seen.since for key, seen in self._seen.items() if at - seen.since > self._unreachable_after_s
        }
        with self.database.read() as session:
            paused = node_loss.is_paused(session)
        if is_outage(since.values(), len(self._seen), self._lost_after_s):
            self._pause(list(since), already=paused)
        elif paused:
            self._resume()
        elif lost := [key for key, began in since.items() if at - began > self._lost_after_s]:
            with self.database.read() as session:
                silent = node_loss.silent_nodes(session)
            for node in silent:
                if node.id in lost and node.heartbeats == self._seen[node.id].count:
                    self._replace(node)

    def _pause(self, silent: list[str], *, already: bool) -> None:
        if already:
            return
        with self.database.write() as session:
            is_new = node_loss.pause(session, silent)
        if is_new:
            log.critical(
                "%d of %d nodes went silent at once: nothing is replaced until most of them report again",
                len(silent), len(self._seen),
            )  # fmt: skip

    def _resume(self) -> None:
        with self.database.write() as session:
            ended = node_loss.resume(session)
        if ended:
            log.warning("most nodes report again: instances of lost nodes are replaced again")

    def _replace(self, node: SilentNode) -> None:
        if self._fencing is not None:
            if not self._fencing.has_fenced(node):
                return
        elif not node.fences_itself:
            return  # its agent is of an earlier release: only the operator knows what runs there
        with self.database.write() as session:
            node_loss.replace(session, node, fenced=self._fencing is not None)
