"""The history: every change appends one event in the transaction that makes it, and readers follow `seq`."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Protocol

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.core import ids
from mooring.core.errors import Gone
from mooring.core.instance import State
from mooring.db.session import Ending, at_end, nudge
from mooring.db.tables import ControlPlane, Event
from mooring.db.types import JsonObject, new_id, now

INSTANCE_STATE_CHANGED = "instance.state_changed"
INSTANCE_GROUP_CHANGED = "instance_group.changed"
NODE_STATE_CHANGED = "node.state_changed"
GPU_HEALTH_CHANGED = "gpu.health_changed"
GPU_CLAIMED = "gpu.claimed"
_PENDING = "mooring.events"
_MOST_REASON = 500


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
        "data": _bounded(data),
    }
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        at_end(session, Ending.EVENTS, _write)
    session.info[_PENDING].append(event)
    nudge(session, *topics(None if project_id is None else [project_id]), *topics(None))


def topics(projects: Iterable[str] | None) -> tuple[str, ...]:
    """What wakes those that follow the events of these projects; null: of all projects, and of machines."""
    return ("events",) if projects is None else tuple(f"events:{project_id}" for project_id in projects)


def _bounded(data: JsonObject) -> JsonObject:
    """The data with its reason cut short: a node's message may be long, and every attempt has some events.

    The instance itself shows all of it.
    """
    reason = data.get("reason")
    if reason is None or max(map(len, reason.values())) <= _MOST_REASON:
        return data
    return {**data, "reason": {name: text[:_MOST_REASON] for name, text in reason.items()}}


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
    # look back. Taken after the locks of rows, it cannot deadlock with them.
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
    query = select(Event).where(Event.seq > after).order_by(Event.seq).limit(limit)
    if projects is not None:
        query = query.where(Event.project_id.in_(projects))
    if instance_id is not None:
        query = query.where(Event.instance_id == instance_id)
    found = session.scalars(query).all()
    if instance_id is None and after > 0:
        _refuse_a_gap(session, after)  # after the read: what retention took away meanwhile is seen
    return found


def _refuse_a_gap(session: Session, after: int) -> None:
    """Raises Gone: events behind `after` are no longer kept, be it that only those of purged instances."""
    purged_to = select(ControlPlane.events_purged_to).limit(1).scalar_subquery()
    first, purged = session.execute(select(func.min(Event.seq), purged_to)).one()
    oldest = max((first or 1) - 1, purged or 0) + 1
    if after < oldest - 1:
        raise Gone(
            f"events up to {oldest - 1} are no longer kept; read the instances anew and follow from after=0",
            oldest_seq=oldest,
        )


def newest_seq(session: Session) -> int:
    return session.scalar(select(func.max(Event.seq))) or 0


def expired(session: Session, before: datetime, after: int, most: int) -> tuple[list[int], int | None]:
    """Events past their time.

    Never the newest: its number must not be given again.

    Args:
        after: where the search goes on.

    Returns:
        Numbers of events to forget, and where to go on; null: all that follow are younger.
    """
    newest, moment = newest_seq(session), now()
    query = select(Event.seq, Event.at).where(Event.seq > after, Event.seq < newest)
    rows = session.execute(query.order_by(Event.seq).limit(most)).all()
    old: list[int] = []
    for seq, at in rows:
        # One from the future was written while the clock was wrong: it must not keep what follows it.
        if before <= at <= moment:
            return old, None
        if at < before:
            old.append(seq)
    return old, rows[-1].seq if rows else None


def forget(session: Session, seqs: Sequence[int]) -> int:
    session.execute(delete(Event).where(Event.seq.in_(seqs)))
    return len(seqs)


def forget_of_instances(session: Session, instance_ids: Sequence[str]) -> None:
    """Drop the events of purged instances; who follows from before the last of them is told so (`Gone`)."""
    newest, theirs = newest_seq(session), Event.instance_id.in_(instance_ids)
    seqs = session.scalars(delete(Event).where(theirs, Event.seq < newest).returning(Event.seq)).all()
    if seqs:
        row, last = ControlPlane, max(seqs)
        behind = row.events_purged_to.is_(None) | (row.events_purged_to < last)
        session.execute(update(row).where(behind).values(events_purged_to=last))
