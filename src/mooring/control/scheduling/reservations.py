"""GPUs that are kept for a project from one moment to another: chosen here, heeded by the scheduler."""

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
from mooring.core.errors import InsufficientCapacity, Invalid, InvalidTransition, NotFound
from mooring.core.gpu import Health
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Gpu, Node, Project, Reservation
from mooring.db.types import JsonObject, new_id, now
from mooring.scheduler import reservations as rules
from mooring.schemas.base import timestamp, timestamp_of


def create(
    session: Session,
    access: Access,
    world: SchedulerCache,
    project: Project,
    name: str,
    gpus: JsonObject,
    from_at: datetime | None,
    to_at: datetime,
) -> Reservation:
    """Choose the cards, and keep them.

    Raises:
        Invalid: code `bad_period`.
        InsufficientCapacity: there are too few; the fields say how many, and from when on there are enough.
    """
    begin = max(from_at or now(), now())
    _refuse_bad_period(begin, to_at)
    row = Reservation(
        id=new_id(ids.RESERVATION), project_id=project.id, name=name, asked=gpus, gpu_uuids=[],
        from_at=begin, to_at=to_at, version=1, created_at=now(),
    )  # fmt: skip
    # Before placing and the nodes, which a delete of the project that came first will want.
    locks.project_key(session, project.id)
    # The lock comes before the look, so that no other transaction gives out what is seen here.
    locks.placing(session)
    _keep(session, row, _chosen(session, world, row))
    session.add(row)
    session.flush()
    storage.add(session, project.id, stored=0)
    audit_log.record(session, access, row.id, project.id, after=_described(row))
    return row


def _refuse_bad_period(from_at: datetime, to_at: datetime) -> None:
    if to_at <= from_at:
        raise Invalid("a reservation ends after it begins, and in the future", code="bad_period")


def _described(row: Reservation) -> dict[str, Any]:
    return {
        "name": row.name,
        "gpus": row.asked,
        "from": timestamp(row.from_at),
        "to": timestamp(row.to_at),
    }


def _asked(session: Session, row: Reservation, world: SchedulerCache) -> rules.Asked:
    cards_alone = {"gpus": row.asked, "cpus": 0, "memory_mib": 0}
    selector = placement_rules.selectors(session, [row.project_id]).get(row.project_id, {})
    request = replace(requests.of_columns(row.id, row.project_id, 0, cards_alone), project_selector=selector)
    moment = now()
    begin = max(row.from_at, moment)
    overhead_s = world.policy.start_overhead_s
    return rules.Asked(request, begin.timestamp(), row.to_at.timestamp(), moment.timestamp(), overhead_s)


def _chosen(
    session: Session, world: SchedulerCache, row: Reservation, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Raises InsufficientCapacity."""
    nodes, asked = world.look(session), _asked(session, row, world)
    there = rules.stock(nodes, asked, but=row.id)
    chosen = rules.choose(there, asked, kept)
    if chosen is None:
        raise _insufficient(there, asked, rules.earliest(nodes, asked, but=row.id))
    return chosen


def _insufficient(
    there: rules.ReservableGpus, asked: rules.Asked, earliest: float | None
) -> InsufficientCapacity:
    when = timestamp_of(earliest)
    hint = f"as many could be from {when} on" if when else "from when on as many could be cannot be told"
    most = there.most()
    return InsufficientCapacity(
        f"{asked.gpus.gpu_count} such GPUs cannot be kept for all of that time, {most} can; {hint}",
        most=most,
        earliest_at=when,
    )


def _keep(session: Session, row: Reservation, uuids: Sequence[str]) -> None:
    """Write down the cards, and have all that look at their nodes and at the former ones look anew."""
    _changed(session, {*row.gpu_uuids, *uuids})
    row.gpu_uuids = list(uuids)


def _changed(session: Session, uuids: Collection[str]) -> None:
    node_ids = session.scalars(select(Gpu.node_id).where(Gpu.uuid.in_(uuids)).distinct()).all()
    locks.nodes(session, node_ids)
    revisions.changed_many(session, node_ids)
    notify(session, Topic.SCHEDULE)


def get(session: Session, access: Access, reservation_id: str) -> Reservation:
    """Raises NotFound, Forbidden: as `Access.require`."""
    return _let_in(session.get(Reservation, reservation_id), access, reservation_id)


def _locked(session: Session, access: Access, reservation_id: str) -> Reservation:
    """As `get`, for a change of what may be placed where."""
    locks.placing(session)
    query = select(Reservation).where(Reservation.id == reservation_id).with_for_update()
    row = session.scalar(query.execution_options(populate_existing=True))
    return _let_in(row, access, reservation_id)


def _let_in(row: Reservation | None, access: Access, reservation_id: str) -> Reservation:
    missing = f"no reservation {reservation_id}"
    if row is None or row.deleted_at is not None:
        raise NotFound(missing)
    access.require(row.project_id, missing)
    return row


def patch(
    session: Session,
    access: Access,
    world: SchedulerCache,
    reservation_id: str,
    changes: Mapping[str, Any],
    if_match: int | None,
) -> Reservation:
    """Change its name, its beginning and its end; it keeps its cards as far as they can be had.

    Raises:
        InvalidTransition: it has ended.
        Invalid, InsufficientCapacity: as `create`.
    """
    row = _locked(session, access, reservation_id)
    concurrency.require_current_version("reservation", row.version, if_match)
    before, was = _described(row), (row.from_at, row.to_at)
    if state_of(row) == "ended":
        raise InvalidTransition("it has ended; make another one", state="ended")
    row.name = changes.get("name", row.name)
    row.from_at, row.to_at = changes.get("from_at", row.from_at), changes.get("to_at", row.to_at)
    if (row.from_at, row.to_at) != was:
        _refuse_bad_period(max(row.from_at, now()), row.to_at)
        shorter = was[0] <= row.from_at and row.to_at <= was[1]
        _keep(session, row, row.gpu_uuids if shorter else _chosen(session, world, row, row.gpu_uuids))
    row.version += 1
    told, became = audit_log.changes(before, _described(row))
    audit_log.record(session, access, row.id, row.project_id, before=told, after=became)
    return row


def delete(session: Session, access: Access, reservation_id: str, if_match: int | None) -> None:
    """Keep the cards no longer; what runs there goes on."""
    row = _locked(session, access, reservation_id)
    concurrency.require_current_version("reservation", row.version, if_match)
    row.deleted_at = now()
    _keep(session, row, row.gpu_uuids)
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))


def give_up(session: Session, project_id: str) -> None:
    """Keep nothing any longer for a project that ends, and that the caller has locked."""
    query = select(Reservation).where(Reservation.project_id == project_id, Reservation.deleted_at.is_(None))
    rows = session.scalars(query.order_by(Reservation.id).with_for_update()).all()
    for row in rows:
        row.deleted_at = now()
    if rows:
        _changed(session, {uuid for row in rows for uuid in row.gpu_uuids})


def state_of(row: Reservation) -> str:
    moment = now()
    if moment >= row.to_at:
        return "ended"
    return "active" if moment >= row.from_at else "scheduled"


def lacking(session: Session) -> list[str]:
    """Reservations some card of which cannot be had any more."""
    living = select(Reservation).where(Reservation.deleted_at.is_(None), Reservation.to_at > now())
    rows = session.scalars(living.order_by(Reservation.id)).all()
    there = usable(session, rows)
    return [row.id for row in rows if not there[row.id].issuperset(row.gpu_uuids)]


def usable(session: Session, rows: Sequence[Reservation]) -> dict[str, set[str]]:
    """Of each reservation the cards that are healthy, on nodes where its project may be placed."""
    uuids = {uuid for row in rows for uuid in row.gpu_uuids}
    query = select(Gpu.uuid, Node.reserved_for, Node.facts).join(Node, Node.id == Gpu.node_id)
    query = query.where(Gpu.uuid.in_(uuids), Gpu.health == Health.HEALTHY, Node.deleted_at.is_(None))
    homes = {home.uuid: home for home in session.execute(query)}
    selectors = placement_rules.selectors(session)
    return {
        row.id: {
            uuid
            for uuid in row.gpu_uuids
            if uuid in homes
            and placement_rules.admits(homes[uuid], row.project_id, selectors.get(row.project_id, {}))
        }
        for row in rows
    }


def mend(session: Session, access: Access, world: SchedulerCache, reservation_id: str) -> None:
    """Take other cards for those that are lost, if there are any for the rest of its time.

    Nothing where somebody has deleted it meanwhile, or it has ended.
    """
    try:
        row = _locked(session, access, reservation_id)
    except NotFound:
        return
    if state_of(row) == "ended":
        return
    kept = usable(session, [row])[row.id]
    asked = _asked(session, row, world)
    chosen = rules.choose(rules.stock(world.look(session), asked, but=row.id, always=kept), asked, kept)
    if chosen is not None and set(chosen) != set(row.gpu_uuids):
        _keep(session, row, chosen)
        row.version += 1
