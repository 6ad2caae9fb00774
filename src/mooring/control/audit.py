"""The audit log: who did what, written in the transaction of the deed, each row chained to the last (R32)."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.audit_size import bounded
from mooring.core import ids
from mooring.core.access import Access
from mooring.db.session import at_end
from mooring.db.tables import AuditEntry
from mooring.db.types import JsonObject, new_id, now
from mooring.schemas.base import timestamp

FIRST_HASH = "0" * 64
_PENDING = "mooring.audit"
_BATCH = 1000


def record(
    session: Session,
    access: Access,
    target_id: str | None,
    project_id: str | None,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write down the deed of this transaction; what the service does by itself is no deed.

    Args:
        before, after: the fields that the deed changes. Never a secret's value, nor anything of `env`.
    """
    if access.action is None:
        return
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        at_end(session, _write)
    session.info[_PENDING].append(
        {
            "id": new_id(ids.AUDIT_ENTRY),
            "at": now(),
            "actor": {
                "kind": access.caller.kind,
                "id": access.caller.id,
                "name": access.caller.name,
                "user_id": access.caller.user_id,
            },
            "address": access.address,
            "request_id": access.request_id,
            "action": access.action,
            "project_id": project_id,
            "target_id": target_id,
            "before": bounded(before),
            "after": bounded(after),
        }
    )


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of two descriptions of one thing, the fields that differ."""
    differ = [name for name in after if before.get(name) != after[name]]
    return {name: before.get(name) for name in differ}, {name: after[name] for name in differ}


def recorded(session: Session) -> int:
    """How many deeds this transaction has written down so far."""
    return len(session.info.get(_PENDING, ()))


# Made once, and run on the connection: every create waits for them while it holds the last lock.
_LAST_HASH = select(AuditEntry.hash).order_by(AuditEntry.seq.desc()).limit(1)
_INSERT = insert(AuditEntry.__table__)  # type: ignore[arg-type]


def _write(session: Session) -> None:
    locks.end_of_logs(session)
    connection = session.connection()
    previous = connection.scalar(_LAST_HASH) or FIRST_HASH
    entries = session.info.pop(_PENDING)
    for entry in entries:
        entry["previous_hash"], entry["hash"] = previous, _hash(previous, entry)
        previous = entry["hash"]
    connection.execute(_INSERT, entries)


_HASHED = (
    "id", "at", "actor", "address", "request_id", "action", "project_id", "target_id", "before", "after",
)  # fmt: skip


def _hash(previous: str, entry: Mapping[str, Any]) -> str:
    """SHA-256 over the hash before, a newline, and the entry's fields (`_HASHED`), as they are shown, as JSON
    in UTF-8 with sorted keys and no spaces.
    """
    content = {name: entry[name] for name in _HASHED}
    content["at"] = timestamp(entry["at"])
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Chain:
    """What became of the chain.

    Attributes:
        rows: that follow from one another, from the first on.
        newest_hash: of the last of them. Kept elsewhere, it tells whether rows were cut off at the end.
        broken_at: the `seq` of the first row that does not follow from the one before it.
    """

    rows: int
    newest_hash: str
    broken_at: int | None


def verify(session: Session) -> Chain:
    """Compute the whole chain anew."""
    rows, previous = 0, FIRST_HASH
    query = select(AuditEntry).order_by(AuditEntry.seq).execution_options(yield_per=_BATCH)
    with closing(session.scalars(query)) as entries:
        for row in entries:
            if row.previous_hash != previous or row.hash != _hash(previous, _entry(row)):
                return Chain(rows, previous, row.seq)
            rows, previous = rows + 1, row.hash
    return Chain(rows, previous, None)


def _entry(row: AuditEntry) -> JsonObject:
    return {name: getattr(row, name) for name in _HASHED}
