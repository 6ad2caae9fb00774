"""`/v1/users`: the users of this installation."""

from typing import Annotated

from fastapi import APIRouter, Query
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
from mooring.api.views import tenants as tenant_views
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import users
from mooring.core.access import Permission, lacking
from mooring.db import tables
from mooring_client.errors import EmailTaken
from mooring_client.schemas.projects import Email, User, UserCreate, UserList, UserPatch

router = APIRouter(prefix="/v1/users", tags=["projects"], route_class=StrictRoute)


class UserQuery(pagination.PageQuery):
    email: Email | None = None


@router.post(
    "", status_code=201, response_model=User, responses=errors(EmailTaken), operation_id="create_user"
)
def create_user(body: UserCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a user. Users who sign on with OIDC are created automatically at their first request."""

    def act(session: Session) -> StoredAnswer:
        row = users.create(session, call.access, body.name, body.email, is_admin=body.is_admin)
        return responses.json_answer(
            tenant_views.user(row), 201, {**etag(row.version), "Location": f"/v1/users/{row.id}"}
        )

    return transactions.idempotent(context, call, act)


@router.get("", response_model=UserList, responses=errors(), operation_id="list_users")
def list_users(context: Ctx, access: CurrentAccess, params: Annotated[UserQuery, Query()]) -> Response:
    """List users. Admins see all; project owners can find one user by the full `email`."""
    if params.email is None and not access.caller.is_admin:
        raise lacking(Permission.ADMIN)
    query = select(tables.User).where(tables.User.deleted_at.is_(None))
    query = pagination.matching(query, params, tables.User.email)
    with context.database.read() as session:
        rows, cursor = pagination.page(session, query, tables.User.id, params, context.identity.cursor_secret)
        shown = [tenant_views.user(row[0], to_admin=access.caller.is_admin) for row in rows]
        content = {"items": shown, "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{user_id}", response_model=User, responses=errors(), operation_id="get_user")
def get_user(user_id: str, context: Ctx, _access: CurrentAccess) -> Response:
    """Get a user. Shows the name and e-mail address."""
    with context.database.read() as session:
        return responses.respond(_answer(users.get(session, user_id)))


def _answer(row: tables.User) -> StoredAnswer:
    return responses.json_answer(tenant_views.user(row), headers=etag(row.version))


@router.patch("/{user_id}", response_model=User, responses=errors(EmailTaken), operation_id="update_user")
def update_user(
    user_id: str, body: UserPatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update a user. Changes the name, the e-mail address or whether the user is an admin."""
    changes = body.model_dump(exclude_unset=True)
    return transactions.audited(
        context, access, lambda session: _answer(users.patch(session, access, user_id, changes, if_match))
    )


@router.delete("/{user_id}", status_code=204, responses=errors(), operation_id="delete_user")
def delete_user(user_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch) -> Response:
    """Delete a user. Removes them from all projects and revokes their API keys; their instances continue."""

    def act(session: Session) -> StoredAnswer:
        users.delete(session, access, user_id, if_match)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)
