"""The event log: each change appends an event in the same transaction, and readers follow `seq`.

Several transactions append at a time, so an event may be committed before one with a lower `seq`. Readers see
the events up to the first that is not committed yet: see `event_order`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.orm import Session

from mooring.control import event_order
from mooring.core import ids
from mooring.db.session import Ending, at_end, notify
from mooring.db.signals import AnyTopic, Topic
from mooring.db.tables import ControlPlane, Event
from mooring.db.types import JsonObject, new_id, now
from mooring_client.errors import Gone
from mooring_client.schemas.states import State

_PENDING = "mooring.events"
_REASON_MAX_CHARACTERS = 500


class EventKind(StrEnum):
    """The `type` of an event."""

    INSTANCE_STATE_CHANGED = "instance.state_changed"
    INSTANCE_EXPIRING = "instance.expiring"
    INSTANCE_GPU_UNHEALTHY = "instance.gpu_unhealthy"
    INSTANCE_GPU_FAULT = "instance.gpu_fault"
    INSTANCE_GROUP_CHANGED = "instance_group.changed"
    PROJECT_QUOTA_NEARLY_USED = "project.quota_nearly_used"
    NODE_STATE_CHANGED = "node.state_changed"
    NODE_LOST = "node.lost"
    REPLACEMENT_PAUSED = "nodes.replacement_paused"
    REPLACEMENT_RESUMED = "nodes.replacement_resumed"
    GPU_HEALTH_CHANGED = "gpu.health_changed"
    GPU_CLAIMED = "gpu.claimed"
    VOLUME_CHANGED = "volume.changed"


def append(
    session: Session,
    kind: EventKind,
    data: JsonObject,
    *,
    project_id: str | None = None,
    instance_id: str | None = None,
) -> None:
    """Add an event to this transaction; it gets its `seq` at the end of the transaction."""
    event = {
        "id": new_id(ids.EVENT),
        "type": str(kind),
        "project_id": project_id,
        "instance_id": instance_id,
        "at": now(),
        "data": _bounded(data),
    }
    if _PENDING not in session.info:
        session.info[_PENDING] = []
        at_end(session, Ending.EVENTS, _write)
    session.info[_PENDING].append(event)
    notify(session, *topics(None if project_id is None else [project_id]), *topics(None))


def topics(projects: Iterable[str] | None) -> tuple[AnyTopic, ...]:
    """What to subscribe to for the events of these projects; None: of all projects and machines."""
    return (Topic.EVENTS,) if projects is None else tuple(map(Topic.project_events, projects))


def _bounded(data: JsonObject) -> JsonObject:
    """The data, with a long reason truncated. The row of the instance, node or GPU has the whole reason."""
    reason = data.get("reason")
    if reason is None or max(map(len, reason.values())) <= _REASON_MAX_CHARACTERS:
        return data
    return {**data, "reason": {name: text[:_REASON_MAX_CHARACTERS] for name, text in reason.items()}}


class AnInstance(Protocol):
    """An instance, or the columns of one."""

    @property
    def id(self) -> str: ...
    @property
    def project_id(self) -> str: ...


def instance_moved(
    session: Session,
    row: AnInstance,
    before: State | None,
    to: State,
    version: int,
    reason: JsonObject | None,
) -> None:
    """Append an event with an instance's new state, and wake those who wait for the instance."""
    data = {
        "instance_id": row.id,
        "from": str(before) if before else None,
        "to": str(to),
        "version": version,
        "reason": reason,
    }
    append(session, EventKind.INSTANCE_STATE_CHANGED, data, project_id=row.project_id, instance_id=row.id)
    notify(session, Topic.instance(row.id))


class AVolume(Protocol):
    """A volume."""

    @property
    def id(self) -> str: ...
    @property
    def project_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def node_id(self) -> str | None: ...


def volume_changed(session: Session, row: AVolume, change: str) -> None:
    """Append an event. Args: change: created, changed, placed, deleting or deleted."""
    data = {"volume_id": row.id, "name": row.name, "change": change, "node_id": row.node_id}
    append(session, EventKind.VOLUME_CHANGED, data, project_id=row.project_id)


# An insert without the ORM: it reads no row back and takes a third of the time.
_INSERT = insert(Event.__table__)  # type: ignore[arg-type]


def _write(session: Session) -> None:
    event_order.begin_append(session)
    session.connection().execute(_INSERT, session.info.pop(_PENDING))


@dataclass(frozen=True, slots=True)
class Page:
    """Events, oldest first.

    Attributes:
        held_back: later events are committed, but an event before them is not. They are readable a few
            milliseconds later, and no notification says when.
    """

    events: Sequence[Event]
    held_back: bool = False


def page(
    session: Session,
    *,
    after: int,
    limit: int,
    complete_to: float,
    projects: frozenset[str] | None = None,
) -> Page:
    """Events after a `seq`, of these projects; None: of all projects and machines.

    Args:
        complete_to: what `event_order.complete_to` returned in an earlier transaction.

    Raises:
        Gone: events after `after` were deleted, or none has had this `seq`: the caller would miss some.
    """
    query = select(Event).where(Event.seq > after).order_by(Event.seq).limit(limit)
    if projects is not None:
        query = query.where(Event.project_id.in_(projects))
    found = session.scalars(query).all()
    _require_no_gap(session, after)
    readable = [event for event in found if event.seq <= complete_to]
    return Page(readable, held_back=len(readable) < len(found))


def page_of_instance(session: Session, instance_id: str, *, after: int, limit: int) -> Sequence[Event]:
    """An instance's events after a `seq`, oldest first, as far as they are kept.

    Their writers lock the instance's row, so they are committed in the order of `seq`.
    """
    query = select(Event).where(Event.seq > after, Event.instance_id == instance_id)
    return session.scalars(query.order_by(Event.seq).limit(limit)).all()


def _require_no_gap(session: Session, after: int) -> None:
    """Raises Gone: some event after `after` was deleted, by retention or with a purged instance; or no event
    has this `seq`, so it is from a state of the database that an older one has replaced.
    """
    if after == 0:
        return
    query = select(ControlPlane.events_purged_to, exists().where(Event.seq == after)).limit(1)
    deleted_to, is_stored = session.execute(query).one()
    if deleted_to is not None and after < deleted_to:
        raise Gone(
            f"events up to {deleted_to} are no longer kept; read the instances again and follow from after=0",
            oldest_seq=deleted_to + 1,
        )
    if not is_stored and after != deleted_to:
        raise Gone(
            f"no event has the seq {after}, as after the restore of an older database; read the instances "
            "again and follow from after=0",
            newest_seq=newest_seq(session),
        )


def newest_seq(session: Session) -> int:
    """The `seq` of the newest event; 0: there is none. An event before it may not be committed yet."""
    return session.scalar(select(func.max(Event.seq))) or 0


def newest_complete_seq(session: Session, complete_to: float) -> int:
    """The `seq` after which to read, to get all later events and none of the earlier ones.

    Args:
        complete_to: as for `page`.
    """
    query = select(func.max(Event.seq))
    if complete_to != math.inf:
        query = query.where(Event.seq <= complete_to)
    return session.scalar(query) or session.scalar(select(ControlPlane.events_purged_to)) or 0


def seq_before(session: Session, at: datetime) -> int:
    """The `seq` after which to read, to get all events since a time. Some of them may be older: check each.

    A search in halves by the key, because the times have no index. Their order is about that of `seq`.
    """
    low, high = session.scalar(select(ControlPlane.events_purged_to)) or 0, newest_seq(session)
    before = low
    while low < high:
        middle = (low + high + 1) // 2
        query = select(Event.seq, Event.at).where(Event.seq <= middle, Event.seq > low)
        row = session.execute(query.order_by(Event.seq.desc()).limit(1)).first()
        if row is None:
            low = middle
        elif row.at < at:
            before, low = row.seq, middle
        else:
            high = row.seq - 1
    return before


def expired(
    session: Session, before: datetime, after: int, most: int
) -> tuple[list[tuple[int, datetime]], int | None]:
    """Find events that retention may delete. Never the newest, whose `seq` must not be reused.

    Args:
        after: the `seq` to continue after.

    Returns:
        The `seq` and time of events to delete, and the `seq` to continue after; None: all later events are
        newer.
    """
    newest, present = newest_seq(session), now()
    query = select(Event.seq, Event.at).where(Event.seq > after, Event.seq < newest)
    rows = session.execute(query.order_by(Event.seq).limit(most)).all()
    old: list[tuple[int, datetime]] = []
    for seq, at in rows:
        # An event from the future (the clock was wrong) must not block those after it.
        if before <= at <= present:
            return old, None
        if at < before:
            old.append((seq, at))
    return old, rows[-1].seq if rows else None


def forget(session: Session, seqs: Sequence[int]) -> int:
    """Delete events. Readers that are behind the last of them get `Gone`."""
    session.execute(delete(Event).where(Event.seq.in_(seqs)))
    _record_deletion(session, seqs)
    return len(seqs)


def forget_of_instances(session: Session, instance_ids: Sequence[str]) -> None:
    """Delete the events of purged instances. Readers that are behind the last of them get `Gone`."""
    # The newest event stays, as in `expired`.
    old = Event.instance_id.in_(instance_ids) & (Event.seq < newest_seq(session))
    _record_deletion(session, session.scalars(delete(Event).where(old).returning(Event.seq)).all())


def _record_deletion(session: Session, seqs: Sequence[int]) -> None:
    if seqs:
        stored, last = ControlPlane.events_purged_to, max(seqs)
        is_behind = stored.is_(None) | (stored < last)
        session.execute(update(ControlPlane).where(is_behind).values(events_purged_to=last))
