"""Templates: named specs of instances with parameters, of a project or of all."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from mooring.control import applying, concurrency
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.audit import audit_log
from mooring.control.tenants import projects, row_limits, storage
from mooring.core import ids
from mooring.core.access import Access, Permission, lacking
from mooring.core.images import ImageName
from mooring.core.json_differences import differences
from mooring.core.placeholders import filled, names_in
from mooring.db.tables import Template
from mooring.db.types import new_id, now
from mooring_client.errors import Invalid, InvalidParameters, NameTaken, NotFound
from mooring_client.schemas.base import Json
from mooring_client.schemas.templates import (
    ParameterValue,
    TemplateApply,
    TemplateCreate,
    TemplateParameter,
)

_CHANGEABLE = ("description", "parameters", "spec")
# With which a template is checked whose parameter has neither a default nor an example.
_SAMPLES: Mapping[str, ParameterValue] = {"string": "x", "integer": 1, "number": 1, "boolean": True}


def sample(request: TemplateApply) -> Json:
    """The spec with defaults and examples, to check it as a spec of an instance.

    Raises:
        Invalid: a placeholder names no parameter.
    """
    if unknown := sorted({*names_in(request.spec)} - request.parameters.keys()):
        named = ", ".join(unknown)
        message = f"there is no parameter {named}; declare it in `parameters`, or write $${{ for the text ${{"
        raise Invalid(message, errors=[{"pointer": "/spec", "code": "unknown_parameter", "message": message}])
    values = {name: _sample_of(each) for name, each in request.parameters.items()}
    return dict(filled(request.spec, values))


def _sample_of(parameter: TemplateParameter) -> ParameterValue:
    for value in (parameter.default, parameter.example):
        if value is not None:
            return value
    return parameter.choices[0] if parameter.choices else _SAMPLES[parameter.type]


def create(session: Session, access: Access, project_id: str | None, request: TemplateCreate) -> Template:
    """Create a template.

    Args:
        project_id: from `Access.project`; None: for all projects.

    Raises:
        NameTaken: the project has a template of this name, or there is a global one.
        NotFound: the project was deleted.
        Forbidden: it is global, and the caller is no admin.
    """
    _require_may_change(access, project_id, "no such project")
    if project_id is not None:
        projects.locked(session, access, project_id)
    row_limits.require_room(session, Template, project_id)
    if _of_name(session, project_id, request.name) is not None:
        raise NameTaken(
            f"a template named {request.name} exists; change it with PUT, or choose another name",
            name=request.name,
        )
    row = _new(project_id, request.name, request)
    session.add(row)
    session.flush()
    _record(session, access, row, after=_described(row))
    return row


def apply_by_name(
    session: Session,
    access: Access,
    project_id: str | None,
    name: str,
    request: TemplateApply,
    if_match: int | None,
) -> ApplyResult[Template]:
    """Create the template of this name, or change what differs.

    Raises:
        MooringError: as `create`.
        PreconditionFailed: it has another version.
    """
    _require_may_change(access, project_id, "no such project")
    row = _of_name(session, project_id, name, locked=True)
    if row is None:
        applying.require_no_version("template", name, if_match)
        fields = request.model_dump(exclude={"name"}, exclude_unset=True)
        return applying.created(create(session, access, project_id, TemplateCreate(name=name, **fields)))
    concurrency.require_current_version("template", row.version, if_match)
    before, after = _described(row), _requested(name, request)
    result = applying.compared(row, differences(before, after), _CHANGEABLE)
    if result.outcome is ApplyOutcome.CHANGED:
        row.description, row.parameters, row.spec = (after[field] for field in _CHANGEABLE)
        row.version += 1
        _record(session, access, row, before=before, after=after)
    return result


def delete(session: Session, access: Access, template_id: str, if_match: int | None) -> None:
    """Delete a template. Instances that were created with it stay as they are.

    Raises:
        NotFound, Forbidden: as `get`, or it is global and the caller is no admin.
        PreconditionFailed: it has another version.
    """
    query = select(Template).where(Template.id == template_id, Template.deleted_at.is_(None))
    row = _visible(session.scalar(query.with_for_update()), access, template_id)
    _require_may_change(access, row.project_id, f"no template {template_id}")
    concurrency.require_current_version("template", row.version, if_match)
    if row.shipped is None:
        session.delete(row)
    else:
        row.deleted_at = now()  # the row keeps it from being created again at the next start
    _record(session, access, row, before=_described(row))


def get(session: Session, access: Access, template_id: str) -> Template:
    """Raises NotFound: there is none that the caller can see."""
    return _visible(session.get(Template, template_id), access, template_id)


def visible(access: Access) -> Any:
    """The condition for rows that the caller sees."""
    is_seen = Template.deleted_at.is_(None)
    if access.projects is None:
        return is_seen
    return is_seen & or_(Template.project_id.is_(None), Template.project_id.in_(access.projects))


def rendered(row: Template, given: Mapping[str, ParameterValue]) -> Json:
    """The spec with these values, and with defaults for the others.

    Raises:
        InvalidParameters: a value is missing, unknown or not allowed; `errors` lists all.
    """
    parameters = {name: TemplateParameter.model_validate(each) for name, each in row.parameters.items()}
    problems = [
        _problem(name, "unknown_parameter", "there is no such parameter")
        for name in given.keys() - parameters
    ]
    values: dict[str, ParameterValue] = {}
    for name, parameter in parameters.items():
        value = given.get(name, parameter.default)
        if value is None:
            problems.append(_problem(name, "missing_parameter", "must be given"))
        elif message := parameter.problem_of(value):
            problems.append(_problem(name, "bad_value", message))
        else:
            values[name] = value
    if problems:
        listed = "; ".join(
            f"{each['pointer'].removeprefix('/parameters/')} {each['message']}" for each in problems
        )
        known = ", ".join(parameters) or "none"
        raise InvalidParameters(f"{listed} (parameters of {row.name}: {known})", errors=problems)
    spec = dict(filled(row.spec, values))
    return {**spec, "labels": {"template": row.name, **spec.get("labels", {})}}


def mirrored(image: str, mirror: str) -> str:
    """The image below the mirror's prefix, with its registry in the path: `mirror/docker.io/library/x:1`.

    An image that is below the mirror already stays as it is.
    """
    return image if image.startswith(f"{mirror}/") else f"{mirror}/{ImageName.parse(image)}"


def _problem(name: str, code: str, message: str) -> dict[str, str]:
    return {"pointer": f"/parameters/{name}", "code": code, "message": message}


def _new(project_id: str | None, name: str, request: TemplateApply) -> Template:
    fields = _requested(name, request)
    return Template(id=new_id(ids.TEMPLATE), project_id=project_id, version=1, created_at=now(), **fields)


def _requested(name: str, request: TemplateApply) -> Json:
    return {"name": name, **request.model_dump(mode="json", include=set(_CHANGEABLE))}


def _described(row: Template) -> Json:
    return {field: getattr(row, field) for field in ("name", *_CHANGEABLE)}


def _record(session: Session, access: Access, row: Template, **change: Json) -> None:
    """Record the action, and count what it writes."""
    if row.project_id is not None:
        storage.add(session, row.project_id, stored=0, written=storage.size(*change.values()))
    audit_log.record(session, access, row.id, row.project_id, **change)


def _of_name(session: Session, project_id: str | None, name: str, *, locked: bool = False) -> Template | None:
    query = select(Template).where(Template.name == name, Template.deleted_at.is_(None))
    query = query.where(Template.project_id == project_id if project_id else Template.project_id.is_(None))
    return session.scalar(query.with_for_update() if locked else query)


def _visible(row: Template | None, access: Access, template_id: str) -> Template:
    missing = f"no template {template_id}"
    if row is None or row.deleted_at is not None:
        raise NotFound(missing)
    if row.project_id is not None:
        access.require(row.project_id, missing)
    return row


def _require_may_change(access: Access, project_id: str | None, missing: str) -> None:
    """Global templates are for admins: all projects see them."""
    if project_id is not None:
        access.require(project_id, missing)
    elif not access.caller.is_admin:
        raise lacking(Permission.ADMIN)
