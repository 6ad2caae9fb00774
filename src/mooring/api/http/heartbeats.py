"""Heartbeats of nodes that come within a short time are stored in one transaction.

A heartbeat alone takes no longer for that: the first one after a pause is stored at once.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.concurrency import run_in_threadpool

from mooring.control.nodes.heartbeats import HeartbeatOutcome, NodeHeartbeat

BETWEEN_BATCHES_S: Final = 0.2
MAX_HEARTBEATS: Final = 250  # in one batch; on SQLite all other writers wait for it
# How long to try to store the heartbeat of a node that other transactions have locked. A heartbeat that waits
# for another reason, such as a busy server, waits on: a report instead would cost ten times as much.
LOCKED_S: Final = 3.0

Store = Callable[[Mapping[str, NodeHeartbeat]], Mapping[str, HeartbeatOutcome]]


@dataclass(eq=False, slots=True)
class _WaitingHeartbeat:
    sent: NodeHeartbeat
    is_stored: asyncio.Future[bool]
    locked_since: float | None = None


class HeartbeatBatches:
    """The heartbeats that wait to be stored. For the event loop's thread only."""

    def __init__(self) -> None:
        self._waiting: dict[str, _WaitingHeartbeat] = {}
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0

    async def stored(self, node_id: str, sent: NodeHeartbeat, store: Store) -> bool:
        """Store a heartbeat. Returns False if a report of the node is needed instead.

        Args:
            store: stores heartbeats by node id, in a thread.

        Raises:
            What `store` raises.
        """
        if (other := self._waiting.get(node_id)) is not None:
            # The node has lost patience with its first call, or two programs use its credential.
            return other.sent.confirms_the_same_as(sent) and await asyncio.shield(other.is_stored)
        waiting = _WaitingHeartbeat(sent, asyncio.get_running_loop().create_future())
        self._waiting[node_id] = waiting
        if self._task is None:
            self._task = asyncio.create_task(self._work(store))
        try:
            return await waiting.is_stored
        finally:
            if self._waiting.get(node_id) is waiting:
                del self._waiting[node_id]

    async def _work(self, store: Store) -> None:
        clock = asyncio.get_running_loop().time
        while self._waiting:
            await asyncio.sleep(max(0.0, self._next_at - clock()))
            self._next_at = clock() + BETWEEN_BATCHES_S
            await self._store(store)
        self._task = None

    async def _store(self, store: Store) -> None:
        batch = dict(list(self._waiting.items())[:MAX_HEARTBEATS])
        try:
            outcomes = await run_in_threadpool(store, {key: each.sent for key, each in batch.items()})
        except Exception as error:
            for waiting in batch.values():
                if not waiting.is_stored.done():
                    waiting.is_stored.set_exception(error)
            self._forget(batch)
            return
        decided = {key: each for key, each in batch.items() if _is_decided(each, outcomes[key])}
        for key, waiting in decided.items():
            if not waiting.is_stored.done():
                waiting.is_stored.set_result(outcomes[key] is HeartbeatOutcome.STORED)
        self._forget(decided)

    def _forget(self, batch: Mapping[str, _WaitingHeartbeat]) -> None:
        for node_id, waiting in batch.items():
            if self._waiting.get(node_id) is waiting:
                del self._waiting[node_id]


def _is_decided(waiting: _WaitingHeartbeat, outcome: HeartbeatOutcome) -> bool:
    """Whether this outcome is the last. That of a locked node is, once it has been locked for `LOCKED_S`."""
    if outcome is not HeartbeatOutcome.LOCKED:
        return True
    if waiting.locked_since is None:
        waiting.locked_since = time.monotonic()
    return time.monotonic() - waiting.locked_since > LOCKED_S
