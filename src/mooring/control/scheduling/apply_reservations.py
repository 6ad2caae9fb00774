"""Applying reservations by name. Several may have one name; the newest counts."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import applying, concurrency, locks
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.scheduling import reservations
from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.access import Access
from mooring.core.json_differences import differences
from mooring.db.tables import Project, Reservation
from mooring.db.types import now
from mooring_client.schemas.base import Json, timestamp
from mooring_client.schemas.reservations import ReservationApply

# By the field's name in the API.
_CHANGEABLE = {"from": "from_at", "to": "to_at"}


def apply_by_name(
    session: Session,
    access: Access,
    cache: SchedulerCache,
    project: Project,
    name: str,
    request: ReservationApply,
    if_match: int | None,
) -> ApplyResult[Reservation]:
    """Create or change the newest reservation of this name.

    One that has ended and differs is left as it is, and another one is created.

    Raises:
        MooringError: as `reservations.create` and `reservations.patch`.
    """
    # In this order, as `reservations.create`. Under the placement lock, no reservation appears or changes.
    locks.project_key(session, project.id)
    locks.placing(session)
    query = select(Reservation).where(Reservation.project_id == project.id, Reservation.name == name)
    newest = (Reservation.created_at.desc(), Reservation.id.desc())
    row = session.scalar(query.where(Reservation.deleted_at.is_(None)).order_by(*newest).limit(1))
    if row is not None:
        concurrency.require_current_version("reservation", row.version, if_match)
        result = applying.compared(row, differences(_stored(row), _asked(row, request)), _CHANGEABLE)
        has_ended = reservations.state_of(row) == "ended"
        if result.outcome is ApplyOutcome.CHANGED and not has_ended:
            changes = {_CHANGEABLE[each.field]: _time(request, each.field) for each in result.differences}
            reservations.patch(session, access, cache, row.id, changes, if_match)
        if result.outcome is ApplyOutcome.UNCHANGED or not has_ended:
            return result
    else:
        applying.require_no_version("reservation", name, if_match)
    gpus = request.gpus.model_dump(mode="json")
    made = reservations.create(session, access, cache, project, name, gpus, request.from_at, request.to_at)
    return applying.created(made)


def _stored(row: Reservation) -> Json:
    return {"gpus": row.asked, "from": timestamp(row.from_at), "to": timestamp(row.to_at)}


def _asked(row: Reservation, request: ReservationApply) -> Json:
    """As requested. A start in the past is that of a reservation which has begun."""
    at, start = now(), request.from_at
    has_begun = row.from_at <= at
    starts_as_it_is = start is None or (has_begun and start <= at)
    return {
        "gpus": request.gpus.model_dump(mode="json"),
        "from": timestamp(row.from_at if starts_as_it_is else start),
        "to": timestamp(request.to_at),
    }


def _time(request: ReservationApply, field: str) -> Any:
    return request.from_at if field == "from" else request.to_at
