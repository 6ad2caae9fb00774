"""Adds new rows of the audit log to its hash chain, and exports the newest head to the log and to a file."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import func, select

from mooring.control.audit import chains
from mooring.control.audit.chains import Head
from mooring.control.audit.signing_keys import AuditKeys
from mooring.db.session import Database
from mooring.db.tables import AuditEntry, AuditHead
from mooring.loops.loop import Loop

log = logging.getLogger(__name__)

HEAD_EVERY_S = 60.0
# On PostgreSQL a row may be committed after rows with a higher `seq`, so rows this new are searched again.
_SETTLED_AFTER_S = 60.0
# A search of the whole log finds rows of transactions that took longer, as in a suspended process.
_SEARCH_ALL_EVERY_S = 3600.0


class SearchStart:
    """The `seq` after which to search for rows that are not linked yet."""

    def __init__(self, settled_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settled_after_s = settled_after_s
        self._clock = clock
        self._searched: deque[tuple[float, int]] = deque()  # when, and the newest `seq` then
        self._search_all_at = clock() + _SEARCH_ALL_EVERY_S
        self.seq = 0

    def searched(self, newest: int) -> None:
        """Note that a search which began when `newest` was the highest `seq` found no more rows."""
        now = self._clock()
        self._searched.append((now, newest))
        while self._searched and now - self._searched[0][0] >= self._settled_after_s:
            self.seq = self._searched.popleft()[1]
        if now >= self._search_all_at:
            self.seq, self._search_all_at = 0, now + _SEARCH_ALL_EVERY_S
            self._searched.clear()


class AuditLinks(Loop):
    """Has no topic: with one tick a second, many rows share a transaction."""

    interval_s = 1.0

    def __init__(self, database: Database, keys: AuditKeys, head_file: Path | None) -> None:
        super().__init__(database)
        self._keys = keys
        self._start = SearchStart(0.0 if database.is_sqlite else _SETTLED_AFTER_S)
        self._head_file = head_file
        self._head_due = 0.0
        self._exported = 0

    def tick(self) -> None:
        self._link()
        if time.monotonic() >= self._head_due:
            with self.database.write() as session:
                chains.make_head(session, self._keys)
            self._head_due = time.monotonic() + HEAD_EVERY_S
        self._export()

    def _link(self) -> None:
        while True:
            with self.database.read() as session:
                newest = session.scalar(select(func.max(AuditEntry.seq))) or 0
                if newest <= self._start.seq or not chains.unlinked(session, self._start.seq, 1):
                    self._start.searched(newest)
                    return
            with self.database.write() as session:
                linked = chains.link(session, self._keys, self._start.seq)
            if len(linked) < chains.BATCH:
                return

    def _export(self) -> None:
        """Export the newest head. Each replica does, so no head is lost with the replica that made it."""
        with self.database.read() as session:
            head = chains.newest_head(session)
        if head is None or head.number <= self._exported:
            return
        if self._exported == 0 and self._head_file is not None:
            self._compare(self._head_file)
        log.info("audit log head %d: %s over %d links", head.number, head.hash, head.links)
        if self._head_file is not None:
            _append(self._head_file, head)
        self._exported = head.number

    def _compare(self, file: Path) -> None:
        """At the start, check that the newest head in the file is still in the database."""
        last = last_exported(file)
        if last is None:
            return
        with self.database.read() as session:
            known = session.scalar(select(AuditHead.hash).where(AuditHead.number == last.number))
        if known != last.hash:
            log.error(
                "the audit log does not contain head %d (%s) of %s: it was cut or replaced, or an older "
                "backup was restored. See: mooring audit verify --heads %s",
                last.number, last.hash, file, file,
            )  # fmt: skip


def last_exported(file: Path) -> Head | None:
    """The newest head in a file of heads."""
    heads = heads_in(file.read_text()) if file.exists() else []
    return max(heads, key=lambda head: head.number, default=None)


def heads_in(text: str) -> list[Head]:
    """The heads in the lines of a file, without invalid lines: a full disk may have cut them short."""
    found = []
    for line in text.splitlines():
        try:
            fields = json.loads(line)
            found.append(
                Head(int(fields["number"]), int(fields["links"]), str(fields["hash"]), str(fields["at"]))
            )
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _append(file: Path, head: Head) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{head.line()}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
