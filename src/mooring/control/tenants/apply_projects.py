"""Applying projects by name, with their quotas and members."""

from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import applying, concurrency
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.audit import audit_log
from mooring.control.tenants import projects
from mooring.core.access import Access, Permission, lacking
from mooring.core.json_differences import JsonDifference, differences
from mooring.db.tables import Member, Project, User
from mooring_client.errors import Invalid, NotFound
from mooring_client.schemas.base import Json
from mooring_client.schemas.projects import ProjectApply, ProjectMember, ProjectSettings, QuotaValues, Role

_SETTINGS = frozenset(ProjectSettings.model_fields)
# Members are an object by user, so that each has a pointer of its own: {"usr_…": "owner"}.
_CHANGEABLE = _SETTINGS | {"members"}


def apply_by_name(
    session: Session, access: Access, name: str, request: ProjectApply, if_match: int | None
) -> ApplyResult[Project]:
    """Create or change the project of this name.

    Raises:
        Forbidden: only admins may create projects and change more than labels and members. It is also the
            answer to callers who cannot see the project, who learn nothing about its existence.
        NameTaken, Conflict: another request was faster; the whole transaction can be repeated.
        NotFound: a member is no user.
        MooringError: as `projects.patch` and `projects.put_member`.
    """
    query = select(Project.id).where(Project.name == name, Project.deleted_at.is_(None))
    project_id = session.scalar(query)
    if project_id is None or not access.caller.sees(project_id):
        if not access.caller.is_admin:
            raise lacking(Permission.ADMIN)
        applying.require_no_version("project", name, if_match)
        return applying.created(_create(session, access, name, request))
    row = projects.locked(session, access, project_id)
    if row.name != name:
        raise applying.changed_meanwhile("project", name)
    concurrency.require_current_version("project", row.version, if_match)
    asked = _asked(session, request)
    found = differences(_stored(session, row, with_members="members" in asked), asked)
    result = applying.compared(row, found, _CHANGEABLE)
    if result.outcome is ApplyOutcome.CHANGED:
        _change(session, access, row, asked, found)
    return result


def _asked(session: Session, request: ProjectApply) -> Json:
    asked = request.model_dump(mode="json", include=set(_SETTINGS))
    if request.members is not None:
        asked["members"] = _roles(session, request.members)
    return asked


def _stored(session: Session, row: Project, *, with_members: bool) -> Json:
    no_quotas = QuotaValues().model_dump(mode="json")
    stored = {**projects.described(row), "quotas": {**no_quotas, **row.quotas}}
    del stored["name"]
    if with_members:
        members = session.scalars(select(Member).where(Member.project_id == row.id))
        stored["members"] = {member.user_id: str(member.role) for member in members}
    return stored


def _roles(session: Session, members: Sequence[ProjectMember]) -> dict[str, str]:
    """Role by user id. Raises NotFound: no such user; Invalid: a user is listed twice."""
    emails = {member.email for member in members if member.email is not None}
    query = select(User.email, User.id).where(User.email.in_(emails), User.deleted_at.is_(None))
    by_email = dict(session.execute(query).all())
    roles: dict[str, str] = {}
    for number, member in enumerate(members):
        user_id = member.user_id or by_email.get(member.email)
        if user_id is None:
            raise NotFound(f"no user {member.email}")
        if user_id in roles:
            message = f"the user {member.user_id or member.email} is listed twice"
            where = {"pointer": f"/members/{number}", "code": "ambiguous_user", "message": message}
            raise Invalid(message, errors=[where])
        roles[user_id] = str(member.role)
    return roles


def _create(session: Session, access: Access, name: str, request: ProjectApply) -> Project:
    asked = _asked(session, request)
    row = projects.insert(session, name, request.labels)
    projects.set_fields(row, {field: asked[field] for field in _SETTINGS})
    for user_id, role in sorted(asked.get("members", {}).items()):
        projects.set_role(session, access, row.id, user_id, Role(role))
    audit_log.record(session, access, row.id, row.id, after={"name": name, **asked})
    return row


def _change(
    session: Session, access: Access, row: Project, asked: Json, found: Sequence[JsonDifference]
) -> None:
    fields = {each.field for each in found}
    before = _stored(session, row, with_members="members" in fields)
    if settings := {field: asked[field] for field in fields - {"members"}}:
        projects.change(session, access, row, settings)
    if "members" in fields:
        _set_members(session, access, row, before["members"], asked["members"])
    was, became = audit_log.changes(before, {field: asked[field] for field in fields})
    audit_log.record(session, access, row.id, row.id, before=was, after=became)


def _set_members(
    session: Session, access: Access, row: Project, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    for user_id in sorted(before.keys() - after.keys()):
        projects.remove_member(session, session.get_one(Member, (row.id, user_id)))
    for user_id, role in sorted(after.items()):
        if before.get(user_id) != role:
            projects.set_role(session, access, row.id, user_id, Role(role))
