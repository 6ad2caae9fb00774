"""`/v1/api-keys`. Users see their own keys, owners those of their projects, admins all."""

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
from mooring.control.tenants import api_keys
from mooring.control.tenants.api_keys import KeyRequest
from mooring.core.access import Permission
from mooring.db import tables
from mooring_client.errors import (
    ExpiryInPast,
    NoMembership,
    NoPermissions,
    NotFound,
    ProjectRequired,
    ScopeOfNoProject,
    TooManyRows,
)
from mooring_client.schemas.api_keys import ApiKey, ApiKeyCreate, ApiKeyList, NewApiKey
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1/api-keys", tags=["keys"], route_class=StrictRoute)


class KeyQuery(pagination.PageQuery):
    project_id: Annotated[Text | None, Field(max_length=64)] = None
    user_id: Annotated[Text | None, Field(max_length=64)] = None


@router.post(
    "",
    status_code=201,
    response_model=NewApiKey,
    responses=errors(
        ExpiryInPast, NoMembership, NoPermissions, NotFound, ProjectRequired, ScopeOfNoProject, TooManyRows
    ),
    operation_id="create_api_key",
)
def create_api_key(body: ApiKeyCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create an API key. Only this response shows the key, which never has more permissions than you.

    Members create keys for themselves (their own `user_id`), owners also for other members and services.
    """
    request = KeyRequest(
        name=body.name,
        project_id=body.project_id,
        user_id=body.user_id,
        role=body.role,
        scopes=frozenset(Permission(scope) for scope in body.scopes),
        expires_at=body.expires_at,
    )

    def act(session: Session) -> StoredAnswer:
        row, secret = api_keys.create(session, call.access, request, context.identity.default_project_id)
        content = {**show(ApiKey, row), "key": secret}
        return responses.json_answer(content, 201, {"Location": f"/v1/api-keys/{row.id}"}, encrypted=True)

    return transactions.idempotent(context, call, act)


@router.get("", response_model=ApiKeyList, responses=errors(), operation_id="list_api_keys")
def list_api_keys(context: Ctx, access: CurrentAccess, params: Annotated[KeyQuery, Query()]) -> Response:
    """List API keys. Returns keys that are not revoked, newest first, with prefix and last use."""
    query = select(tables.ApiKey).where(api_keys.not_revoked(), api_keys.visible(access))
    query = pagination.matching(query, params, tables.ApiKey.project_id, tables.ApiKey.user_id)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.ApiKey.id, params, secret)
        content = {"items": [show(ApiKey, row[0]) for row in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{key_id}", response_model=ApiKey, responses=errors(), operation_id="get_api_key")
def get_api_key(key_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get an API key. The response does not contain the key itself."""
    with context.database.read() as session:
        return responses.respond(responses.json_answer(show(ApiKey, api_keys.get(session, access, key_id))))


@router.delete("/{key_id}", status_code=204, responses=errors(), operation_id="delete_api_key")
def delete_api_key(key_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Revoke an API key. It stops working within 1 second; its open streams end within 5 seconds."""

    def act(session: Session) -> StoredAnswer:
        api_keys.revoke(session, access, key_id)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)
