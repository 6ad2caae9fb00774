"""Reservations: GPUs for one project from a start to an end time. Chosen here, enforced at placement."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import concurrency, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.instances import placement_rules
from mooring.control.scheduling import requests
from mooring.control.scheduling.cache import SchedulerCache
from mooring.control.tenants import storage
from mooring.core import ids
from mooring.core.access import Access
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Gpu, Node, Project, Reservation
from mooring.db.types import JsonObject, new_id, now
from mooring.scheduler import reservations as rules
from mooring_client.errors import (
    BadPeriod,
    InsufficientCapacity,
    InvalidTransition,
    NotFound,
)
from mooring_client.schemas.base import timestamp, timestamp_of
from mooring_client.schemas.gpus import Health


def create(
    session: Session,
    access: Access,
    cache: SchedulerCache,
    project: Project,
    name: str,
    gpus: JsonObject,
    from_at: datetime | None,
    to_at: datetime,
) -> Reservation:
    """Choose GPUs and reserve them.

    Raises:
        BadPeriod: it does not end after its start and in the future.
        InsufficientCapacity: too few GPUs are free; the fields say how many, and when enough will be.
    """
    begin = max(from_at or now(), now())
    _require_valid_period(begin, to_at)
    row = Reservation(
        id=new_id(ids.RESERVATION), project_id=project.id, name=name, asked=gpus, gpu_uuids=[],
        from_at=begin, to_at=to_at, version=1, created_at=now(),
    )  # fmt: skip
    # Before the placement lock and those of nodes: a delete of the project locks the project first, too.
    locks.project_key(session, project.id)
    # Lock before reading, so that no other transaction allocates what is seen here as free.
    locks.placing(session)
    _set_gpus(session, row, _choose(session, cache, row))
    session.add(row)
    session.flush()
    storage.add(session, project.id, stored=0)
    audit_log.record(session, access, row.id, project.id, after=_described(row))
    return row


def _require_valid_period(from_at: datetime, to_at: datetime) -> None:
    if to_at <= from_at:
        raise BadPeriod("a reservation must end after it begins, and in the future")


def _described(row: Reservation) -> dict[str, Any]:
    return {
        "name": row.name,
        "gpus": row.asked,
        "from": timestamp(row.from_at),
        "to": timestamp(row.to_at),
    }


def _spec(session: Session, row: Reservation, cache: SchedulerCache) -> rules.ReservationSpec:
    gpus_only = {"gpus": row.asked, "cpus": 0, "memory_mib": 0}
    selector = placement_rules.selectors(session, [row.project_id]).get(row.project_id, {})
    request = replace(requests.of_columns(row.id, row.project_id, 0, gpus_only), project_selector=selector)
    at = now()
    start, end, now_s = (time.timestamp() for time in (max(row.from_at, at), row.to_at, at))
    return rules.ReservationSpec(request, start, end, now_s, cache.policy.start_overhead_s)


def _choose(
    session: Session, cache: SchedulerCache, row: Reservation, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Choose free GPUs, preferably those `kept`. Raises InsufficientCapacity."""
    nodes, spec = cache.nodes(session), _spec(session, row, cache)
    reservable = rules.reservable_gpus(nodes, spec, ignored_id=row.id)
    chosen = rules.choose(reservable, spec, kept)
    if chosen is None:
        raise _insufficient(reservable, spec, rules.earliest(nodes, spec, ignored_id=row.id))
    return chosen


def _insufficient(
    reservable: rules.ReservableGpus, spec: rules.ReservationSpec, earliest: float | None
) -> InsufficientCapacity:
    when = timestamp_of(earliest)
    hint = f"enough GPUs are free from {when} on" if when else "it is unknown when enough will be free"
    most = reservable.most()
    return InsufficientCapacity(
        f"cannot reserve {spec.gpus.gpu_count} such GPUs for all of that time, only {most}; {hint}",
        most=most,
        earliest_at=when,
    )


def _set_gpus(session: Session, row: Reservation, uuids: Sequence[str]) -> None:
    """Store the GPUs, and mark their nodes and those of the former GPUs as changed."""
    _mark_changed(session, {*row.gpu_uuids, *uuids})
    row.gpu_uuids = list(uuids)


def _mark_changed(session: Session, uuids: Collection[str]) -> None:
    node_ids = session.scalars(select(Gpu.node_id).where(Gpu.uuid.in_(uuids)).distinct()).all()
    locks.nodes(session, node_ids)
    revisions.changed_many(session, node_ids)
    notify(session, Topic.SCHEDULE)


def get(session: Session, access: Access, reservation_id: str) -> Reservation:
    """Raises NotFound, Forbidden: as `Access.require`."""
    return _visible(session.get(Reservation, reservation_id), access, reservation_id)


def _locked(session: Session, access: Access, reservation_id: str) -> Reservation:
    """As `get`, with the placement lock and the row locked."""
    locks.placing(session)
    query = select(Reservation).where(Reservation.id == reservation_id).with_for_update()
    row = session.scalar(query.execution_options(populate_existing=True))
    return _visible(row, access, reservation_id)


def _visible(row: Reservation | None, access: Access, reservation_id: str) -> Reservation:
    missing = f"no reservation {reservation_id}"
    if row is None or row.deleted_at is not None:
        raise NotFound(missing)
    access.require(row.project_id, missing)
    return row


def patch(
    session: Session,
    access: Access,
    cache: SchedulerCache,
    reservation_id: str,
    changes: Mapping[str, Any],
    if_match: int | None,
) -> Reservation:
    """Change the name, start or end of a reservation. It keeps those of its GPUs that are free then.

    Raises:
        InvalidTransition: it has ended.
        Invalid, InsufficientCapacity: as `create`.
    """
    row = _locked(session, access, reservation_id)
    concurrency.require_current_version("reservation", row.version, if_match)
    before = _described(row)
    old_from, old_to = row.from_at, row.to_at
    if state_of(row) == "ended":
        raise InvalidTransition("the reservation has ended; create another one", state="ended")
    row.name = changes.get("name", row.name)
    row.from_at, row.to_at = changes.get("from_at", row.from_at), changes.get("to_at", row.to_at)
    if (row.from_at, row.to_at) != (old_from, old_to):
        _require_valid_period(max(row.from_at, now()), row.to_at)
        shorter = old_from <= row.from_at and row.to_at <= old_to
        _set_gpus(session, row, row.gpu_uuids if shorter else _choose(session, cache, row, row.gpu_uuids))
    row.version += 1
    was, became = audit_log.changes(before, _described(row))
    audit_log.record(session, access, row.id, row.project_id, before=was, after=became)
    return row


def delete(session: Session, access: Access, reservation_id: str, if_match: int | None) -> None:
    """Delete a reservation, which releases its GPUs. Running instances keep running."""
    row = _locked(session, access, reservation_id)
    concurrency.require_current_version("reservation", row.version, if_match)
    row.deleted_at = now()
    _set_gpus(session, row, row.gpu_uuids)
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def delete_all(session: Session, project_id: str) -> None:
    """Delete all reservations of a project that is being deleted and that the caller has locked."""
    query = select(Reservation).where(Reservation.project_id == project_id, Reservation.deleted_at.is_(None))
    rows = session.scalars(query.order_by(Reservation.id).with_for_update()).all()
    for row in rows:
        row.deleted_at = now()
    if rows:
        _mark_changed(session, {uuid for row in rows for uuid in row.gpu_uuids})


def state_of(row: Reservation) -> str:
    at = now()
    if at >= row.to_at:
        return "ended"
    return "active" if at >= row.from_at else "scheduled"


def with_unusable_gpus(session: Session) -> list[str]:
    """Ids of the reservations that have not ended and have a GPU that is no longer usable."""
    query = select(Reservation).where(Reservation.deleted_at.is_(None), Reservation.to_at > now())
    rows = session.scalars(query.order_by(Reservation.id)).all()
    still_usable = usable(session, rows)
    return [row.id for row in rows if not still_usable[row.id].issuperset(row.gpu_uuids)]


def usable(session: Session, rows: Sequence[Reservation]) -> dict[str, set[str]]:
    """By reservation, its GPUs that are healthy and on nodes that its project may use."""
    uuids = {uuid for row in rows for uuid in row.gpu_uuids}
    query = select(Gpu.uuid, Node.reserved_for, Node.facts).join(Node, Node.id == Gpu.node_id)
    query = query.where(Gpu.uuid.in_(uuids), Gpu.health == Health.HEALTHY, Node.deleted_at.is_(None))
    located = {each.uuid: each for each in session.execute(query)}
    selectors = placement_rules.selectors(session)
    return {
        row.id: {
            uuid
            for uuid in row.gpu_uuids
            if uuid in located
            and placement_rules.admits(located[uuid], row.project_id, selectors.get(row.project_id, {}))
        }
        for row in rows
    }


def repair(session: Session, access: Access, cache: SchedulerCache, reservation_id: str) -> None:
    """Replace the unusable GPUs of a reservation, if others are free for the rest of its time.

    Does nothing if the reservation was deleted meanwhile or has ended.
    """
    try:
        row = _locked(session, access, reservation_id)
    except NotFound:
        return
    if state_of(row) == "ended":
        return
    kept = usable(session, [row])[row.id]
    spec = _spec(session, row, cache)
    reservable = rules.reservable_gpus(cache.nodes(session), spec, ignored_id=row.id, always=kept)
    chosen = rules.choose(reservable, spec, kept)
    if chosen is not None and set(chosen) != set(row.gpu_uuids):
        _set_gpus(session, row, chosen)
        row.version += 1
