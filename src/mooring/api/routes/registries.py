"""`/v1/registries`: write-only credentials for pulling a project's images."""

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
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.views.show import show
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import owned, projects, registries
from mooring.db import tables
from mooring_client.errors import (
    NameTaken,
    NotFound,
    ProjectRequired,
    RegistryNotAllowed,
    TooManyRows,
)
from mooring_client.schemas.registries import Registry, RegistryCreate, RegistryList, RegistryPut
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1/registries", tags=["registries"], route_class=StrictRoute)


class RegistryQuery(pagination.PageQuery):
    project_id: Annotated[Text | None, Field(max_length=64)] = None


@router.post(
    "",
    status_code=201,
    response_model=Registry,
    responses=errors(NameTaken, NotFound, ProjectRequired, RegistryNotAllowed, TooManyRows),
    operation_id="create_registry",
)
def create_registry(body: RegistryCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create registry credentials. Nodes use them to pull the project's images; they are stored encrypted."""

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, context.identity.default_project_id)
        row = registries.create(
            session, call.access, context.encryptor, project.id, body.server, body.username, body.password
        )
        return responses.json_answer(show(Registry, row), 201, {"Location": f"/v1/registries/{row.id}"})

    return transactions.idempotent(context, call, act)


@router.get("", response_model=RegistryList, responses=errors(), operation_id="list_registries")
def list_registries(
    context: Ctx, access: CurrentAccess, params: Annotated[RegistryQuery, Query()]
) -> Response:
    """List registry credentials. Returns credentials without passwords, newest first."""
    query = pagination.visible(select(tables.Registry), tables.Registry.project_id, access)
    query = pagination.matching(query, params, tables.Registry.project_id)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.Registry.id, params, secret)
        content = {"items": [show(Registry, row[0]) for row in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{registry_id}", response_model=Registry, responses=errors(), operation_id="get_registry")
def get_registry(registry_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get registry credentials. The response does not contain the password."""
    with context.database.read() as session:
        row = owned.get(session, access, tables.Registry, registry_id)
        return responses.respond(responses.json_answer(show(Registry, row)))


@router.put("/{registry_id}", response_model=Registry, responses=errors(), operation_id="replace_registry")
def replace_registry(registry_id: str, body: RegistryPut, context: Ctx, access: CurrentAccess) -> Response:
    """Replace the registry password. The next pull uses the new one."""

    def act(session: Session) -> StoredAnswer:
        row = registries.replace(session, access, context.encryptor, registry_id, body.password)
        return responses.json_answer(show(Registry, row))

    return transactions.audited(context, access, act)


@router.delete("/{registry_id}", status_code=204, responses=errors(), operation_id="delete_registry")
def delete_registry(registry_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Delete registry credentials. Nodes can then no longer pull the registry's private images."""

    def act(session: Session) -> StoredAnswer:
        registries.delete(session, access, registry_id)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)
