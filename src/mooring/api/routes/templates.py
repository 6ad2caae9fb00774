"""`/v1/templates`: named specs of instances with parameters."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field, ValidationError
from pydantic_core import to_json
from sqlalchemy import or_, select
from sqlalchemy.orm import Session
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import applying, pagination, responses, transactions
from mooring.api.http.applying import DryRunOption, documented, require_same_name
from mooring.api.http.body import StrictRoute
from mooring.api.http.problems import invalid
from mooring.api.http.responses import IfMatch
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import SPEC, errors
from mooring.api.views.show import show
from mooring.control.applying import ApplyResult
from mooring.control.idempotency import StoredAnswer
from mooring.control.tenants import projects, templates
from mooring.core.access import Access
from mooring.db import tables
from mooring_client.errors import InvalidParameters, NameTaken, NotFound, ProjectRequired, TooManyRows
from mooring_client.schemas.base import Json
from mooring_client.schemas.spec import InstanceTemplate
from mooring_client.schemas.templates import (
    RenderedTemplate,
    Template,
    TemplateApply,
    TemplateCreate,
    TemplateList,
    TemplateRender,
)
from mooring_client.schemas.text import Name, Text

router = APIRouter(prefix="/v1/templates", tags=["templates"], route_class=StrictRoute)

PathName = Annotated[Name, Path()]


class TemplateQuery(pagination.PageQuery):
    name: Annotated[Text | None, Field(max_length=63)] = None
    project_id: Annotated[
        Text | None, Field(max_length=64, description="templates of this project, and global ones")
    ] = None


@router.post(
    "",
    status_code=201,
    response_model=Template,
    responses=errors(NameTaken, NotFound, ProjectRequired, TooManyRows, *SPEC),
    operation_id="create_template",
)
def create_template(body: TemplateCreate, context: Ctx, call: CurrentCall) -> Response:
    """Create a template. Its spec is checked with the defaults and examples of its parameters."""
    _require_valid(body)

    def act(session: Session) -> StoredAnswer:
        project_id = _project_of(context, session, call.access, body)
        return _answer_of(session, templates.create(session, call.access, project_id, body), 201)

    return transactions.idempotent(context, call, act)


@router.get("", response_model=TemplateList, responses=errors(), operation_id="list_templates")
def list_templates(
    context: Ctx, access: CurrentAccess, params: Annotated[TemplateQuery, Query()]
) -> Response:
    """List templates. Returns those of your projects and the global ones, newest first."""
    row = tables.Template
    query = pagination.matching(select(row).where(templates.visible(access)), params, row.name)
    if params.project_id is not None:
        query = query.where(or_(row.project_id.is_(None), row.project_id == params.project_id))
    with context.database.read() as session:
        secret = context.identity.cursor_secret
        rows, cursor = pagination.page(session, query, row.id, params, secret)
        content = {"items": [_shown(each[0]) for each in rows], "next_cursor": cursor}
    return responses.respond(responses.json_answer(content))


@router.get("/{template_id}", response_model=Template, responses=errors(), operation_id="get_template")
def get_template(template_id: str, context: Ctx, access: CurrentAccess) -> Response:
    """Get a template. Returns its parameters, and its spec with placeholders."""
    with context.database.read() as session:
        return responses.respond(_answer_of(session, templates.get(session, access, template_id)))


@router.put(
    "/by-name/{name}",
    response_model=None,
    responses={**documented(Template), **errors(NameTaken, ProjectRequired, TooManyRows, *SPEC)},
    operation_id="apply_template",
)
async def apply_template(
    name: PathName,
    body: TemplateApply,
    context: Ctx,
    access: CurrentAccess,
    if_match: IfMatch,
    dry_run: DryRunOption = False,
) -> Response:
    """Create or change the template of a name. Repeating the same request changes nothing.

    Instances that were created with it stay as they are.
    """
    require_same_name(name, body.name)
    _require_valid(body)

    def act(session: Session) -> ApplyResult[tables.Template]:
        project_id = _project_of(context, session, access, body)
        return templates.apply_by_name(session, access, project_id, name, body, if_match)

    return await applying.answer(context, access, "template", act, _answer_of, dry_run=dry_run)


@router.delete("/{template_id}", status_code=204, responses=errors(), operation_id="delete_template")
def delete_template(template_id: str, context: Ctx, access: CurrentAccess, if_match: IfMatch) -> Response:
    """Delete a template. Instances that were created with it stay as they are."""

    def act(session: Session) -> StoredAnswer:
        templates.delete(session, access, template_id, if_match)
        return responses.NO_CONTENT

    return transactions.audited(context, access, act)


@router.post(
    "/{template_id}/render",
    response_model=RenderedTemplate,
    responses=errors(InvalidParameters, *SPEC),
    operation_id="render_template",
)
def render_template(template_id: str, body: TemplateRender, context: Ctx, access: CurrentAccess) -> Response:
    """Fill in the parameters of a template. Returns the body of a `POST /v1/instances`; creates nothing."""
    with context.database.read() as session:
        row = templates.get(session, access, template_id)
        name, is_global = row.name, row.project_id is None
        spec = templates.rendered(row, body.parameters)
    _require_instance(spec)
    if is_global and (mirror := context.settings.template_mirror):
        spec["image"] = templates.mirrored(spec["image"], mirror)
    content = {"template_id": template_id, "name": name, "spec": spec}
    return responses.respond(responses.json_answer(content))


def _project_of(context: Context, session: Session, access: Access, body: TemplateApply) -> str | None:
    if body.scope == "global":
        return None
    return projects.for_new(session, access, body.project_id, context.identity.default_project_id).id


def _require_valid(body: TemplateApply) -> None:
    """Raises Invalid: with defaults and examples, the spec is not one of an instance."""
    _require_instance(templates.sample(body))


def _require_instance(spec: Json) -> None:
    try:
        InstanceTemplate.model_validate_json(to_json(spec))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise invalid([{**each, "loc": ("body", "spec", *each["loc"])} for each in found]) from None


def _answer_of(session: Session, row: tables.Template, status: int = 200) -> StoredAnswer:
    session.flush()
    headers = responses.etag(row.version)
    if status == 201:
        headers["Location"] = f"/v1/templates/{row.id}"
    return responses.json_answer(_shown(row), status, headers)


def _shown(row: tables.Template) -> Json:
    return show(Template, row, shipped=row.shipped is not None)
