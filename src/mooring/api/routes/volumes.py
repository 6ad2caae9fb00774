"""`/v1/volumes`: files that outlive the instances that mount them."""

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
from mooring.api.views import volumes as volume_views
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import projects
from mooring.control.volumes import volumes
from mooring.db import tables
from mooring_client.errors import (
    NameTaken,
    NfsNotAllowed,
    NodeSelectorConflict,
    NotFound,
    ProjectRequired,
    QuotaExceeded,
    TooManyRows,
    VolumeInUse,
    VolumeSizeFixed,
)
from mooring_client.schemas.text import Text
from mooring_client.schemas.volumes import Volume, VolumeCreate, VolumeDriver, VolumeList, VolumePatch

router = APIRouter(prefix="/v1/volumes", tags=["volumes"], route_class=StrictRoute)


class VolumeQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None
    driver: VolumeDriver | None = None
    node_id: Annotated[Text | None, Field(max_length=64)] = None
    project_id: Annotated[Text | None, Field(max_length=64)] = None


@router.post(
    "",
    status_code=201,
    response_model=Volume,
    responses=errors(
        NameTaken, NfsNotAllowed, NodeSelectorConflict, NotFound, ProjectRequired, QuotaExceeded, TooManyRows
    ),
    operation_id="create_volume",
)
def create_volume(body: VolumeCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a volume. Its nodes create it when the first instance that mounts it starts there."""

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, context.identity.default_project_id)
        return answer_of(session, volumes.create(session, call.access, project, body.name, body), 201)

    return transactions.idempotent(context, call, act)


def answer_of(session: Session, row: tables.Volume, status: int = 200) -> StoredAnswer:
    session.flush()
    headers = etag(row.version)
    if status == 201:
        headers["Location"] = f"/v1/volumes/{row.id}"
    return responses.json_answer(volume_views.of_rows(session, [row])[0], status, headers)


@router.get("", response_model=VolumeList, responses=errors(), operation_id="list_volumes")
def list_volumes(context: Ctx, access: CurrentAccess, params: Annotated[VolumeQuery, Query()]) -> Response:
    """List volumes. Returns those of your projects, newest first, without those that are being deleted."""
    query = select(tables.Volume).where(tables.Volume.deleted_at.is_(None))
    query = pagination.visible(query, tables.Volume.project_id, access)
    filters = (tables.Volume.name, tables.Volume.driver, tables.Volume.node_id, tables.Volume.project_id)
    query = pagination.matching(query, params, *filters)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.Volume.id, params, secret)
        items = volume_views.of_rows(session, [row[0] for row in rows])
    return responses.respond(responses.json_answer({"items": items, "next_cursor": cursor}))


@router.get("/{volume_id}", response_model=Volume, responses=errors(), operation_id="get_volume")
def get_volume(volume_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a volume. Shows where it is, its size, and which instances mount it."""
    with context.database.read() as session:
        return responses.respond(answer_of(session, volumes.get(session, access, volume_id)))


@router.patch(
    "/{volume_id}",
    response_model=Volume,
    responses=errors(QuotaExceeded, VolumeSizeFixed),
    operation_id="update_volume",
)
def update_volume(
    volume_id: str, body: VolumePatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update a volume. Changes its labels, and its size while no node has it."""
    changes = body.model_dump(exclude_unset=True)

    def act(session: Session) -> StoredAnswer:
        return answer_of(session, volumes.patch(session, access, volume_id, changes, if_match))

    return transactions.audited(context, access, act)


@router.delete(
    "/{volume_id}",
    status_code=202,
    response_model=Volume,
    responses=errors(VolumeInUse),
    operation_id="delete_volume",
)
def delete_volume(volume_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch) -> Response:
    """Delete a volume with all its files. An nfs server keeps its files.

    409 while an instance mounts it, a stopped one included. It is shown as `deleting` until its nodes have
    removed it.
    """

    def act(session: Session) -> StoredAnswer:
        return answer_of(session, volumes.delete(session, access, volume_id, if_match), 202)

    return transactions.audited(context, access, act)
