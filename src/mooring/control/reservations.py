"""GPUs that are kept for a project from one moment to another: chosen here, heeded by the scheduler."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import audit, locks, revisions, versions
from mooring.control.world import World
from mooring.core import ids
from mooring.core.access import Access
from mooring.core.errors import InsufficientCapacity, Invalid, InvalidTransition, NotFound
from mooring.core.gpu import Health
from mooring.core.instance import GpuRequest
from mooring.db.session import nudge
from mooring.db.tables import Gpu, Project, Reservation
from mooring.db.types import JsonObject, new_id, now
from mooring.scheduler import reservations as rules
from mooring.scheduler.model import Request
from mooring.schemas.base import timestamp


def create(
    session: Session,
    access: Access,
    world: World,
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
    # The lock comes before the look, so that no other transaction gives out what is seen here.
    locks.placing(session)
    _keep(session, row, _chosen(session, world, row))
    session.add(row)
    session.flush()
    audit.record(session, access, row.id, project.id, after=_described(row))
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


def _asked(row: Reservation, world: World) -> rules.Asked:
    gpus = GpuRequest.model_validate(row.asked, strict=False)
    request = Request(
        instance_id=row.id,
        queued_at=0.0,
        gpu_count=gpus.count,
        gpu_models=gpus.models,
        gpu_min_memory_mib=gpus.min_memory_mib,
        gpu_min_compute_capability=gpus.min_compute_capability,
        cpu_milli=0,
        memory_mib=0,
        node_selector={},
        project_id=row.project_id,
    )
    moment = now()
    begin = max(row.from_at, moment)
    overhead_s = world.policy.start_overhead_s
    return rules.Asked(request, begin.timestamp(), row.to_at.timestamp(), moment.timestamp(), overhead_s)


def _chosen(session: Session, world: World, row: Reservation, kept: Collection[str] = ()) -> tuple[str, ...]:
    """Raises InsufficientCapacity."""
    nodes, asked = world.look(session), _asked(row, world)
    there = rules.stock(nodes, asked, but=row.id)
    chosen = rules.choose(there, asked, kept)
    if chosen is None:
        raise _insufficient(there, asked, rules.earliest(nodes, asked, but=row.id))
    return chosen


def _insufficient(there: rules.Stock, asked: rules.Asked, earliest: float | None) -> InsufficientCapacity:
    when = timestamp(datetime.fromtimestamp(earliest, now().tzinfo)) if earliest is not None else None
    hint = f"as many for as long could be kept from {when}" if when else "no moment can be told from which on"
    most = there.most()
    return InsufficientCapacity(
        f"{asked.gpus.gpu_count} such GPUs cannot be kept for all of that time, {most} can; {hint}",
        most=most,
        earliest_at=when,
    )


def _keep(session: Session, row: Reservation, uuids: Sequence[str]) -> None:
    """Write down the cards, and have all that look at their nodes and at the former ones look anew."""
    query = select(Gpu.node_id).where(Gpu.uuid.in_({*row.gpu_uuids, *uuids})).distinct()
    node_ids = session.scalars(query).all()
    locks.nodes(session, node_ids)
    row.gpu_uuids = list(uuids)
    revisions.changed_many(session, node_ids)
    nudge(session, "schedule")


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
    world: World,
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
    versions.refuse_stale("reservation", row.version, if_match)
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
    told, became = audit.changes(before, _described(row))
    audit.record(session, access, row.id, row.project_id, before=told, after=became)
    return row


def delete(session: Session, access: Access, reservation_id: str, if_match: int | None) -> None:
    """Keep the cards no longer; what runs there goes on."""
    row = _locked(session, access, reservation_id)
    versions.refuse_stale("reservation", row.version, if_match)
    row.deleted_at = now()
    _keep(session, row, row.gpu_uuids)
    audit.record(session, access, row.id, row.project_id, before=_described(row))


def state_of(row: Reservation) -> str:
    moment = now()
    if moment >= row.to_at:
        return "ended"
    return "active" if moment >= row.from_at else "scheduled"


def lacking(session: Session) -> list[str]:
    """Reservations some card of which is not healthy."""
    living = select(Reservation).where(Reservation.deleted_at.is_(None), Reservation.to_at > now())
    rows = session.scalars(living.order_by(Reservation.id)).all()
    healthy = _healthy(session, {uuid for row in rows for uuid in row.gpu_uuids})
    return [row.id for row in rows if not healthy.issuperset(row.gpu_uuids)]


def _healthy(session: Session, uuids: Collection[str]) -> set[str]:
    return set(session.scalars(select(Gpu.uuid).where(Gpu.uuid.in_(uuids), Gpu.health == Health.HEALTHY)))


def mend(session: Session, access: Access, world: World, reservation_id: str) -> None:
    """Take other cards for those that are not healthy, if there are any for the rest of its time."""
    row = _locked(session, access, reservation_id)
    kept = _healthy(session, row.gpu_uuids)
    asked = _asked(row, world)
    chosen = rules.choose(rules.stock(world.look(session), asked, but=row.id, always=kept), asked, kept)
    if chosen is not None and set(chosen) != set(row.gpu_uuids):
        _keep(session, row, chosen)
        row.version += 1
