"""How many bytes of the database each project uses, and the limits on them.

Each project has two counts. Stored bytes: specs and labels of its instances and groups until they are purged.
Written bytes: what creates and updates wrote in the current UTC day, which bounds rows that are kept for some
time (events, answers) or for good (the audit log). Stops and deletes are never rejected.
"""

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Row, delete, func, select, text, update
from sqlalchemy.orm import Session

from mooring.db.session import Ending, at_end
from mooring.db.tables import Instance, ProjectStorage
from mooring.db.types import JsonObject, now
from mooring_client.errors import DailyWriteLimit, QuotaExceeded
from mooring_client.schemas.base import timestamp

# Counted for each row that a request writes: other columns, indexes, events and the audit log entry.
ROW_BYTES: Final = 2048
_PENDING = "mooring.storage"


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits for each project."""

    stored_bytes: int
    written_bytes_per_day: int


@dataclass(slots=True)
class _Pending:
    """What this transaction adds, by project."""

    stored: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    enforced: bool = False


def size(*documents: JsonObject) -> int:
    """Bytes of JSON documents as stored in the database."""
    return sum(len(json.dumps(document)) for document in documents)


def add(session: Session, project_id: str, *, stored: int, written: int | None = None, rows: int = 1) -> None:
    """Count what a request stores; `enforce` rejects the request if that is too much.

    Args:
        stored: bytes of documents; negative if a document became smaller.
        written: bytes of documents that were written; None: `stored`.
        rows: the number of rows that the request inserts or updates.
    """
    pending = _pending(session)
    pending.enforced = True
    pending.stored[project_id] += stored
    pending.written[project_id] += (stored if written is None else written) + rows * ROW_BYTES


def add_answer(session: Session, project_id: str | None, written: int) -> None:
    """Count an answer that is stored for replay. On its own, it never makes `enforce` reject a request."""
    if project_id is not None:
        _pending(session).written[project_id] += written


def _pending(session: Session) -> _Pending:
    pending: _Pending = session.info.setdefault(_PENDING, _Pending())
    return pending


# A project's counts are spread over this many rows, so that its writers seldom wait for each other's commit.
STRIPES: Final = 16

_ADD = text(
    """
    INSERT INTO project_storage AS own (project_id, stripe, stored_bytes, written_bytes, written_on)
    VALUES (:project_id, :stripe, :stored, :written, :day)
    ON CONFLICT (project_id, stripe) DO UPDATE SET
        stored_bytes = own.stored_bytes + :stored,
        written_bytes = CASE WHEN own.written_on = :day THEN own.written_bytes + :written ELSE :written END,
        written_on = :day
    """
)
_SUMS = text(
    """
    SELECT CAST(sum(stored_bytes) AS BIGINT) AS stored_bytes,
        CAST(sum(CASE WHEN written_on = :day THEN written_bytes ELSE 0 END) AS BIGINT) AS written_bytes
    FROM project_storage WHERE project_id = :project_id
    """
)


def enforce(session: Session, limits: StorageLimits) -> None:
    """When the transaction ends, add its counts to those of the projects, and check the limits.

    Raises, at the end of the transaction:
        QuotaExceeded: the project would exceed its stored bytes; `quota` is `stored_bytes`.
        DailyWriteLimit: the project would exceed its written bytes of today.
    """
    pending: _Pending | None = session.info.pop(_PENDING, None)
    if pending is not None:
        at_end(session, Ending.COUNTS, lambda ending: _write(ending, pending, limits))


def _write(session: Session, pending: _Pending, limits: StorageLimits) -> None:
    at = now()
    for project_id in sorted(pending.written):
        stored, written = pending.stored[project_id], pending.written[project_id]
        day, stripe = _day(at), _stripe(session)
        values = {
            "project_id": project_id,
            "stripe": stripe,
            "stored": stored,
            "written": written,
            "day": day,
        }
        session.connection().execute(_ADD, values)
        if pending.enforced:
            sums = session.connection().execute(_SUMS, {"project_id": project_id, "day": day}).one()
            _require_within(limits, sums, stored, written, at)


def _stripe(session: Session) -> int:
    return secrets.randbelow(STRIPES) if session.get_bind().dialect.name == "postgresql" else 0


def _day(at: datetime) -> str:
    return at.date().isoformat()


def _require_within(limits: StorageLimits, sums: Row[Any], stored: int, written: int, at: datetime) -> None:
    if stored > 0 and sums.stored_bytes > limits.stored_bytes:
        raise QuotaExceeded(
            f"specs and labels of the project's instances would take {sums.stored_bytes} bytes; the "
            f"limit is {limits.stored_bytes}. Delete instances (they count until they are purged), and move "
            "large env values into images",
            quota="stored_bytes",
            limit=limits.stored_bytes,
            used=sums.stored_bytes - stored,
            asked=stored,
        )
    if sums.written_bytes > limits.written_bytes_per_day:
        resets_at = (at + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        raise DailyWriteLimit(
            f"the project has written {sums.written_bytes - written} bytes today; the limit is "
            f"{limits.written_bytes_per_day} a day, and the count resets at {timestamp(resets_at)}",
            retry_after_s=max(1, round((resets_at - at).total_seconds())),
            limit=limits.written_bytes_per_day,
            used=sums.written_bytes - written,
            asked=written,
            resets_at=timestamp(resets_at),
        )


def subtract(session: Session, freed: Mapping[str, int]) -> None:
    """Subtract the bytes of purged rows, by project."""
    for project_id in sorted(freed):
        of_project = select(ProjectStorage.stripe).where(ProjectStorage.project_id == project_id)
        left = ProjectStorage.stored_bytes - freed[project_id]
        one = (ProjectStorage.project_id == project_id) & ProjectStorage.stripe.in_(of_project.limit(1))
        session.execute(update(ProjectStorage).where(one).values(stored_bytes=left))


def above_half(session: Session, limits: StorageLimits) -> list[tuple[str, int]]:
    """Projects above half of their stored bytes that have deleted instances, each with its excess."""
    half = limits.stored_bytes // 2
    deleted = select(Instance.project_id).where(Instance.deleted_at.is_not(None))
    stored = func.sum(ProjectStorage.stored_bytes)
    query = select(ProjectStorage.project_id, stored).where(ProjectStorage.project_id.in_(deleted))
    query = query.group_by(ProjectStorage.project_id).having(stored > half)
    return [(project_id, int(total) - half) for project_id, total in session.execute(query)]


def forget(session: Session, project_ids: Sequence[str]) -> None:
    """Delete the counts of purged projects."""
    session.execute(delete(ProjectStorage).where(ProjectStorage.project_id.in_(project_ids)))
