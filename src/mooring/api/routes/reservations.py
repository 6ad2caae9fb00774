"""`/v1/reservations`: GPUs reserved for a project for a period."""

from collections.abc import Collection, Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.responses import IfMatch, etag
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.views import gpus as gpu_views
from mooring.api.views.show import show
from mooring.control.idempotency import StoredAnswer
from mooring.control.scheduling import reservations
from mooring.control.tenants import projects
from mooring.db import tables
from mooring_client.errors import (
    BadPeriod,
    InsufficientCapacity,
    InvalidTransition,
    NotFound,
    ProjectRequired,
)
from mooring_client.schemas.base import Json
from mooring_client.schemas.reservations import (
    Reservation,
    ReservationCreate,
    ReservationList,
    ReservationPatch,
    ReservedDevice,
)
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1/reservations", tags=["reservations"], route_class=StrictRoute)


class ReservationQuery(pagination.PageQuery):
    project_id: Annotated[Text | None, Field(max_length=64)] = None


@router.post(
    "",
    status_code=201,
    response_model=Reservation,
    responses=errors(BadPeriod, InsufficientCapacity, NotFound, ProjectRequired),
    operation_id="create_reservation",
)
def create_reservation(body: ReservationCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a reservation. Reserves GPUs for a project; 409 if too few are free for the whole period.

    Until the reservation begins, other projects may use its GPUs for instances that end before it begins.
    """

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, context.identity.default_project_id)
        gpus = body.gpus.model_dump(mode="json")
        row = reservations.create(
            session, call.access, context.scheduler_cache, project, body.name, gpus, body.from_at, body.to_at
        )
        return answer_of(session, row, 201)

    return transactions.idempotent(context, call, act)


def answer_of(session: Session, row: tables.Reservation, status: int = 200) -> StoredAnswer:
    session.flush()
    headers = etag(row.version)
    if status == 201:
        headers["Location"] = f"/v1/reservations/{row.id}"
    return responses.json_answer(_reservations(session, [row])[0], status, headers)


def _reservations(session: Session, rows: Sequence[tables.Reservation]) -> list[Json]:
    uuids = {uuid for row in rows for uuid in row.gpu_uuids}
    gpus = {gpu.uuid: gpu for gpu in session.scalars(select(tables.Gpu).where(tables.Gpu.uuid.in_(uuids)))}
    names = gpu_views.node_names(session, {gpu.node_id for gpu in gpus.values()})
    usable = reservations.usable(session, rows)
    return [
        _reservation(row, [gpus[uuid] for uuid in row.gpu_uuids if uuid in gpus], names, usable[row.id])
        for row in rows
    ]


def _reservation(
    row: tables.Reservation, gpus: Sequence[tables.Gpu], names: dict[str, str], usable_uuids: Collection[str]
) -> Json:
    gpus = sorted(gpus, key=lambda gpu: (gpu.node_id, gpu.index))
    usable = [gpu for gpu in gpus if gpu.uuid in usable_uuids]
    used_by_others = [gpu for gpu in usable if gpu.milli_held and gpu.held_by != row.project_id]
    return show(
        Reservation,
        row,
        gpus=row.asked,
        state=reservations.state_of(row),
        devices=[show(ReservedDevice, gpu, node_name=names.get(gpu.node_id, "")) for gpu in gpus],
        missing=row.asked["count"] - len(usable),
        awaited=len(used_by_others),
    )


@router.get("", response_model=ReservationList, responses=errors(), operation_id="list_reservations")
def list_reservations(
    context: Ctx, access: CurrentAccess, params: Annotated[ReservationQuery, Query()]
) -> Response:
    """List reservations. Returns those of your projects, newest first, including ended ones."""
    query = select(tables.Reservation).where(tables.Reservation.deleted_at.is_(None))
    query = pagination.visible(query, tables.Reservation.project_id, access)
    query = pagination.matching(query, params, tables.Reservation.project_id)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.Reservation.id, params, secret)
        content = {"items": _reservations(session, [row[0] for row in rows]), "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get(
    "/{reservation_id}", response_model=Reservation, responses=errors(), operation_id="get_reservation"
)
def get_reservation(reservation_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a reservation. Shows its period and its GPUs."""
    with context.database.read() as session:
        return responses.respond(answer_of(session, reservations.get(session, access, reservation_id)))


@router.patch(
    "/{reservation_id}",
    response_model=Reservation,
    responses=errors(BadPeriod, InsufficientCapacity, InvalidTransition),
    operation_id="update_reservation",
)
def update_reservation(
    reservation_id: str, body: ReservationPatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update a reservation. Changes its name or period; GPUs that are not free then are replaced."""
    changes = body.model_dump(exclude_unset=True)

    def act(session: Session) -> StoredAnswer:
        row = reservations.patch(session, access, context.scheduler_cache, reservation_id, changes, if_match)
        return answer_of(session, row)

    return transactions.audited(context, access, act)


@router.delete("/{reservation_id}", status_code=204, responses=errors(), operation_id="delete_reservation")
def delete_reservation(
    reservation_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Delete a reservation. Its GPUs become available to all; running instances continue."""

    def act(session: Session) -> StoredAnswer:
        reservations.delete(session, access, reservation_id, if_match)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)
