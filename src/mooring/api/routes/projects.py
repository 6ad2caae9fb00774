"""`/v1/projects`: projects and their members."""

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
from mooring.api.views import tenants as tenant_views
from mooring.control.idempotency import StoredAnswer
from mooring.control.scheduling import quotas
from mooring.control.tenants import projects
from mooring.db import tables
from mooring_client.errors import DefaultProject, NameTaken, ProjectInUse, TooManyRows
from mooring_client.schemas.projects import (
    Member,
    MemberList,
    MemberPut,
    Project,
    ProjectCreate,
    ProjectList,
    ProjectPatch,
)
from mooring_client.schemas.text import Text

router = APIRouter(prefix="/v1/projects", tags=["projects"], route_class=StrictRoute)


class ProjectQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None


@router.post(
    "", status_code=201, response_model=Project, responses=errors(NameTaken), operation_id="create_project"
)
def create_project(body: ProjectCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a project. It starts without members, quotas or other limits."""

    def act(session: Session) -> StoredAnswer:
        row = projects.create(session, call.access, body.name, body.labels)
        return answer_of(session, row, 201)

    return transactions.idempotent(context, call, act)


@router.get("", response_model=ProjectList, responses=errors(), operation_id="list_projects")
def list_projects(context: Ctx, access: CurrentAccess, params: Annotated[ProjectQuery, Query()]) -> Response:
    """List projects. Returns the projects of which you are a member, newest first; admins see all."""
    query = select(tables.Project).where(tables.Project.deleted_at.is_(None))
    query = pagination.visible(query, tables.Project.id, access)
    query = pagination.matching(query, params, tables.Project.name)
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, tables.Project.id, params, secret)
        content = {"items": [tenant_views.project(row[0]) for row in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{project_id}", response_model=Project, responses=errors(), operation_id="get_project")
def get_project(project_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a project. Shows its quotas, its other limits and its usage."""
    with context.database.read() as session:
        return responses.respond(answer_of(session, projects.get(session, access, project_id)))


def answer_of(session: Session, row: tables.Project, status: int = 200) -> StoredAnswer:
    headers = etag(row.version)
    if status == 201:
        headers["Location"] = f"/v1/projects/{row.id}"
    return responses.json_answer(tenant_views.project(row, quotas.usage(session, row)), status, headers)


@router.patch(
    "/{project_id}",
    response_model=Project,
    responses=errors(DefaultProject, NameTaken),
    operation_id="update_project",
)
def update_project(
    project_id: str, body: ProjectPatch, context: Ctx, access: CurrentAccess, if_match: IfMatch
) -> Response:
    """Update a project. Owners change the name and labels, admins all fields."""
    changes = body.model_dump(mode="json", exclude_unset=True)
    sso_names = {grant.project or "" for grants in context.settings.oidc_roles.values() for grant in grants}
    default = context.identity.default_project_id

    def act(session: Session) -> StoredAnswer:
        row = projects.patch(session, access, project_id, changes, default, if_match, sso_names)
        return answer_of(session, row)

    return transactions.audited(context, access, act)


@router.delete(
    "/{project_id}",
    status_code=204,
    responses=errors(DefaultProject, ProjectInUse),
    operation_id="delete_project",
)
def delete_project(project_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch) -> Response:
    """Delete a project. Deletes its keys, secrets and reservations too; fails while it has instances."""

    def act(session: Session) -> StoredAnswer:
        projects.delete(session, access, project_id, context.identity.default_project_id, if_match)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)


@router.get(
    "/{project_id}/members", response_model=MemberList, responses=errors(), operation_id="list_members"
)
def list_members(
    project_id: str, context: Ctx, access: CurrentAccess, params: Annotated[pagination.PageQuery, Query()]
) -> Response:
    """List project members. Each shows the user and their role."""
    member = tables.Member
    with context.database.read() as session:
        query = select(member).where(member.project_id == projects.get(session, access, project_id).id)
        rows, cursor = pagination.page(session, query, member.user_id, params, context.identity.cursor_secret)
        content = {"items": tenant_views.members(session, [row[0] for row in rows]), "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.put(
    "/{project_id}/members/{user_id}",
    response_model=Member,
    responses=errors(TooManyRows),
    operation_id="put_member",
)
def put_member(
    project_id: str, user_id: str, body: MemberPut, context: Ctx, access: CurrentAccess
) -> Response:
    """Add or update a project member. Sets the role of a user in the project."""

    def act(session: Session) -> StoredAnswer:
        row = projects.put_member(session, access, project_id, user_id, body.role)
        return responses.json_answer(tenant_views.members(session, [row])[0])

    return transactions.audited(context, access, act)


@router.delete(
    "/{project_id}/members/{user_id}", status_code=204, responses=errors(), operation_id="delete_member"
)
def delete_member(project_id: str, user_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Remove a project member. Also revokes their API keys of this project."""

    def act(session: Session) -> StoredAnswer:
        projects.delete_member(session, access, project_id, user_id)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)
