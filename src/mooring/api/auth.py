"""Credentials and whom they stand for, remembered for a moment."""

import time
from threading import Lock
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

from mooring.control import api_keys
from mooring.core import credentials
from mooring.core.access import Caller
from mooring.db.session import Database

# A revoked key must stop working within a second on every replica; looking it up for each request would
# cost more than most requests do.
REMEMBERED_S = 0.5
NODE_REMEMBERED_S = 60.0
_LIMIT = 20_000

Known = TypeVar("Known")


class _Memory(Generic[Known]):
    """Values by the hash of a secret, for a time. Failures are not remembered."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._lock = Lock()
        self._known: dict[str, tuple[float, Known]] = {}

    def get(self, hashed: str) -> Known | None:
        found = self._known.get(hashed)
        return found[1] if found and time.monotonic() - found[0] < self._kept_s else None

    def put(self, hashed: str, known: Known, since: float) -> None:
        with self._lock:
            if len(self._known) >= _LIMIT:
                self._known.clear()
            self._known[hashed] = (since, known)


class Credentials:
    """Callers by their key, for half a second; nodes by their credential, for a minute."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._callers: _Memory[Caller] = _Memory(REMEMBERED_S)
        self._nodes: _Memory[str] = _Memory(NODE_REMEMBERED_S)

    async def caller(self, secret: str) -> Caller:
        """Whom the key stands for.

        Raises:
            Unauthorized: nobody.
        """
        hashed = credentials.hashed(secret)
        known = self._callers.get(hashed)
        return known if known is not None else await run_in_threadpool(self._look_up, secret, hashed)

    async def node(self, secret: str) -> str:
        """The node of a credential seen in the last minute. Whoever acts on it looks at the node itself.

        Raises:
            Unauthorized: none.
        """
        hashed = credentials.hashed(secret)
        known = self._nodes.get(hashed)
        return known if known is not None else await run_in_threadpool(self._look_up_node, secret, hashed)

    def _look_up(self, secret: str, hashed: str) -> Caller:
        # The clock is read before the look: what is revoked during it is not remembered for longer.
        since = time.monotonic()
        with self._database.read() as session:
            caller, stale = api_keys.identify(session, secret)
        if stale:
            with self._database.write() as session:
                api_keys.note_use(session, caller.id)
        self._callers.put(hashed, caller, since)
        return caller

    def _look_up_node(self, secret: str, hashed: str) -> str:
        since = time.monotonic()
        with self._database.read() as session:
            node_id = api_keys.identify_node(session, secret)
        self._nodes.put(hashed, node_id, since)
        return node_id
