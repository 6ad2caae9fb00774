"""`/v1/secrets`: write-only values for environment variables."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session, defer
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Ctx
from mooring.api.http import pagination, responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.views.show import show
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import owned, projects, secrets
from mooring.db import tables
from mooring_client.errors import NameTaken, NotFound, ProjectRequired, TooManyRows
from mooring_client.schemas.secrets import Secret, SecretCreate, SecretList, SecretPut
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1/secrets", tags=["secrets"], route_class=StrictRoute)


class SecretQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None
    project_id: Annotated[Text | None, Field(max_length=64)] = None


@router.post(
    "",
    status_code=201,
    response_model=Secret,
    responses=errors(NameTaken, NotFound, ProjectRequired, TooManyRows),
    operation_id="create_secret",
)
def create_secret(body: SecretCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a secret. Its value is stored encrypted; only instances that name the secret get it."""

    def act(session: Session) -> StoredAnswer:
        project = projects.for_new(session, call.access, body.project_id, context.identity.default_project_id)
        row = secrets.create(session, call.access, context.encryptor, project.id, body.name, body.value)
        return responses.json_answer(show(Secret, row), 201, {"Location": f"/v1/secrets/{row.id}"})

    return transactions.idempotent(context, call, act)


@router.get("", response_model=SecretList, responses=errors(), operation_id="list_secrets")
def list_secrets(context: Ctx, access: CurrentAccess, params: Annotated[SecretQuery, Query()]) -> Response:
    """List secrets. Returns secrets without their values, newest first."""
    query = select(tables.Secret).options(defer(tables.Secret.sealed_value))
    query = pagination.visible(query, tables.Secret.project_id, access)
    query = pagination.matching(query, params, tables.Secret.name, tables.Secret.project_id)
    with context.database.read() as session:
        rows, cursor = pagination.page(
            session, query, tables.Secret.id, params, context.identity.cursor_secret
        )
        content = {"items": [show(Secret, row[0]) for row in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{secret_id}", response_model=Secret, responses=errors(), operation_id="get_secret")
def get_secret(secret_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a secret. The response does not contain its value."""
    with context.database.read() as session:
        row = owned.get(session, access, tables.Secret, secret_id)
        return responses.respond(responses.json_answer(show(Secret, row)))


@router.put("/{secret_id}", response_model=Secret, responses=errors(), operation_id="replace_secret")
def replace_secret(secret_id: str, body: SecretPut, context: Ctx, access: CurrentAccess) -> Response:
    """Replace a secret. Running instances keep the old value until their next start or restart."""

    def act(session: Session) -> StoredAnswer:
        row = secrets.replace(session, access, context.encryptor, secret_id, body.value)
        return responses.json_answer(show(Secret, row))

    return transactions.audited(context, access, act)


@router.delete("/{secret_id}", status_code=204, responses=errors(), operation_id="delete_secret")
def delete_secret(secret_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Delete a secret. Instances that name it can no longer start."""

    def act(session: Session) -> StoredAnswer:
        secrets.delete(session, access, secret_id)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)
