"""The history: every change appends one event in the transaction that makes it, and readers follow `seq`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.core import ids
from mooring.core.errors import Gone
from mooring.core.instance import State
from mooring.db.session import at_end, nudge
from mooring.db.tables import Event
from mooring.db.types import JsonObject, new_id, now

INSTANCE_STATE_CHANGED = "instance.state_changed"
INSTANCE_GROUP_CHANGED = "instance_group.changed"
NODE_STATE_CHANGED = "node.state_changed"
GPU_HEALTH_CHANGED = "gpu.health_changed"
GPU_CLAIMED = "gpu.claimed"
_PENDING = "mooring.events"


def append(
    session: Session,
    kind: str,
    data: JsonObject,
    *,
    project_id: str | None = None,
    instance_id: str | None = None,
) -> None:
    """Add an event to this transaction; it gets its `seq` when the transaction ends."""
    event = {
        "id": new_id(ids.EVENT),
        "type": kind,
        "project_id": project_id,
        "instance_id": instance_id,
        "at": now(),
        "data": data,
    }
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        at_end(session, _write)
    session.info[_PENDING].append(event)
    nudge(session, "events")


class Moved(Protocol):
    """An instance, or the columns of one."""

    @property
    def id(self) -> str: ...
    @property
    def project_id(self) -> str: ...


def instance_moved(
    session: Session, row: Moved, before: State | None, to: State, version: int, reason: JsonObject | None
) -> None:
    """Append an instance's new state, and wake who waits for it."""
    data = {
        "instance_id": row.id,
        "from": str(before) if before else None,
        "to": str(to),
        "version": version,
        "reason": reason,
    }
    append(session, INSTANCE_STATE_CHANGED, data, project_id=row.project_id, instance_id=row.id)
    nudge(session, f"instance:{row.id}")


# Nobody needs them back, and the table's own insert costs a third of the mapped one.
_INSERT = insert(Event.__table__)  # type: ignore[arg-type]


def _write(session: Session) -> None:
    # Numbers are drawn before the commit, so without a lock a reader could see 8 before 7 and never
    # look back. Taken as the last lock of every transaction, it cannot deadlock with the rows' locks.
    locks.end_of_events(session)
    session.connection().execute(_INSERT, session.info.pop(_PENDING))


def page(
    session: Session,
    *,
    after: int,
    limit: int,
    projects: frozenset[str] | None = None,
    instance_id: str | None = None,
) -> Sequence[Event]:
    """Events after a `seq`, oldest first; of some projects only, or of all and of the machines too.

    Raises:
        Gone: the events right after it are no longer kept, so the caller would miss some.
    """
    if instance_id is None and after > 0:
        _refuse_a_gap(session, after)
    query = select(Event).where(Event.seq > after).order_by(Event.seq).limit(limit)
    if projects is not None:
        query = query.where(Event.project_id.in_(projects))
    if instance_id is not None:
        query = query.where(Event.instance_id == instance_id)
    return session.scalars(query).all()


def _refuse_a_gap(session: Session, after: int) -> None:
    oldest = session.scalar(select(func.min(Event.seq)))
    if oldest is not None and after < oldest - 1:
        raise Gone(
            f"events up to {oldest - 1} are no longer kept; read the instances anew and follow from after=0",
            oldest_seq=oldest,
        )


def newest_seq(session: Session) -> int:
    return session.scalar(select(func.max(Event.seq))) or 0


def forget_older_than(session: Session, days: int) -> None:
    """Drop events past their keeping time, but never the newest: its number must not be given again."""
    newest = newest_seq(session)
    session.execute(delete(Event).where(Event.at < now() - timedelta(days=days), Event.seq < newest))
