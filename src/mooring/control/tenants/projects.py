"""Projects (the tenants) and their members."""

from collections.abc import Container, Mapping
from typing import Any

from sqlalchemy import delete as sql_delete
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from mooring.control import concurrency, locks
from mooring.control.audit import audit_log
from mooring.control.scheduling import reservations
from mooring.control.tenants import api_keys, row_limits
from mooring.core import ids
from mooring.core.access import Access, Permission, lacking
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import (
    ApiKey,
    Instance,
    Member,
    Project,
    Registry,
    Secret,
    SshKey,
    Template,
    User,
    Volume,
    Webhook,
)
from mooring.db.types import JsonObject, new_id, now
from mooring_client.errors import DefaultProject, NameTaken, NotFound, ProjectInUse
from mooring_client.schemas.projects import Role

# The fields that owners may change. The others decide how machines are shared, which is up to admins.
OWNERS_FIELDS = frozenset({"name", "labels"})


def new(name: str, labels: JsonObject) -> Project:
    return Project(
        id=new_id(ids.PROJECT), name=name, labels=labels, quotas={}, weight=1.0, allowed_images=None,
        security_profile="standard", gpu_sharing=False, host_network=False,
        node_selector=None, local_images=False, require_disk_limits=False, public_ports=False,
        version=1, created_at=now(),
    )  # fmt: skip


def create(session: Session, access: Access, name: str, labels: JsonObject) -> Project:
    """Raises NameTaken."""
    row = insert(session, name, labels)
    audit_log.record(session, access, row.id, row.id, after={"name": name, "labels": labels})
    return row


def insert(session: Session, name: str, labels: JsonObject) -> Project:
    """As `create`, without the row in the audit log."""
    _require_free_name(session, name)
    row = new(name, labels)
    session.add(row)
    session.flush()
    return row


def _require_free_name(session: Session, name: str) -> None:
    # The unique index decides; this check gives the common case a clear error.
    if session.scalar(select(Project.id).where(Project.name == name, Project.deleted_at.is_(None))):
        raise NameTaken(f"a project named {name} exists; choose another name", name=name)


def get(session: Session, access: Access, project_id: str) -> Project:
    """A project that is not deleted.

    Raises:
        NotFound: it does not exist, or the caller is not in it.
        Forbidden: the caller is in it but may not do this.
    """
    return _visible(session.get(Project, project_id), access, project_id)


def locked(session: Session, access: Access, project_id: str) -> Project:
    """As `get`, with the row locked."""
    query = select(Project).where(Project.id == project_id).with_for_update()
    row = session.scalar(query.execution_options(populate_existing=True))
    return _visible(row, access, project_id)


def _visible(row: Project | None, access: Access, project_id: str) -> Project:
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no project {project_id}")
    access.require(row.id, f"no project {project_id}")
    return row


def for_new(session: Session, access: Access, project_id: str | None, default: str) -> Project:
    """The project that a new resource goes to; see `Access.project`.

    Raises:
        NotFound: no such project that the caller may see.
        Forbidden: the caller is in it but may not do this.
        ProjectRequired.
    """
    return locks.live_project(session, access.project(project_id, default))


def patch(
    session: Session,
    access: Access,
    project_id: str,
    changes: Mapping[str, Any],
    default_project: str,
    if_match: int | None,
    reserved_names: Container[str] = (),
) -> Project:
    """Change some fields; `quotas` are merged, one limit at a time.

    Args:
        reserved_names: project names that sign-on grants roles by. An owner must not choose one: it would let
            the users with these roles into the project.

    Raises:
        Forbidden: only admins may set one of the fields, or this name.
        DefaultProject: the next start finds the default project by its name.
        NameTaken, NotFound, PreconditionFailed.
    """
    row = locked(session, access, project_id)
    concurrency.require_current_version("project", row.version, if_match)
    before = described(row)
    if changes.get("name", row.name) != row.name:
        if not access.caller.is_admin and changes["name"] in reserved_names:
            raise lacking(Permission.ADMIN)
        if project_id == default_project:
            raise DefaultProject("the default project cannot be renamed")
        _require_free_name(session, changes["name"])
        _change_versions(session, row.id)
    change(session, access, row, changes)
    was, became = audit_log.changes(before, described(row))
    audit_log.record(session, access, row.id, row.id, before=was, after=became)
    return row


def change(session: Session, access: Access, row: Project, changes: Mapping[str, Any]) -> None:
    """Change fields of a locked project, without a row in the audit log.

    Raises:
        Forbidden: only admins may set one of the fields.
    """
    if not access.caller.is_admin and not changes.keys() <= OWNERS_FIELDS:
        raise lacking(Permission.ADMIN)
    set_fields(row, changes)
    row.version += 1
    notify(session, Topic.SCHEDULE)  # a higher quota or other nodes may let instances start


def set_fields(row: Project, values: Mapping[str, Any]) -> None:
    for field, value in values.items():
        setattr(row, field, {**row.quotas, **value} if field == "quotas" else value)
    row.node_selector = row.node_selector or None


def _change_versions(session: Session, project_id: str) -> None:
    """Instances show URLs of their ports, which contain the project's name."""
    live = (Instance.project_id == project_id) & Instance.deleted_at.is_(None)
    session.execute(update(Instance).where(live).values(version=Instance.version + 1))


def described(row: Project) -> dict[str, Any]:
    return {
        "name": row.name,
        "labels": row.labels,
        "quotas": row.quotas,
        "weight": row.weight,
        "allowed_images": row.allowed_images,
        "security_profile": row.security_profile,
        "max_priority": row.max_priority,
        "guaranteed_gpus": row.guaranteed_gpus,
        "gpu_sharing": row.gpu_sharing,
        "host_network": row.host_network,
        "node_selector": row.node_selector or {},
        "local_images": row.local_images,
        "require_disk_limits": row.require_disk_limits,
        "public_ports": row.public_ports,
    }


def delete(
    session: Session, access: Access, project_id: str, default_project: str, if_match: int | None
) -> None:
    """Delete a project with its keys, SSH keys, members, secrets, registries, webhooks and
    reservations.

    Its audit log and the record of its GPU usage are kept.

    Raises:
        ProjectInUse: it has instances or volumes.
        DefaultProject: it is the default project, which serves requests of admins that name none.
    """
    row = locked(session, access, project_id)
    concurrency.require_current_version("project", row.version, if_match)
    if project_id == default_project:
        raise DefaultProject("the default project cannot be deleted")
    remaining = select(Instance.id).where(Instance.project_id == project_id, Instance.deleted_at.is_(None))
    if session.scalar(remaining.limit(1)):
        raise ProjectInUse("this project has instances, ended ones included; delete them first")
    volumes = select(Volume.id).where(Volume.project_id == project_id, Volume.deleted_at.is_(None))
    if session.scalar(volumes.limit(1)):
        raise ProjectInUse("this project has volumes; delete them first, with their files")
    api_keys.revoke_all(session, ApiKey.project_id == project_id)
    locks.webhooks(session)
    for table in (Member, Secret, Registry, SshKey, Template, Webhook):
        session.execute(sql_delete(table).where(table.project_id == project_id))
    reservations.delete_all(session, project_id)
    row.deleted_at = now()
    audit_log.record(session, access, row.id, row.id, before=described(row))


def put_member(session: Session, access: Access, project_id: str, user_id: str, role: Role) -> Member:
    """Add a user to the project, or change their role.

    Raises:
        NotFound: no such project or user.
    """
    locked(session, access, project_id)
    before = session.get(Member, (project_id, user_id))
    was = {"role": str(before.role)} if before else None
    row = set_role(session, access, project_id, user_id, role)
    audit_log.record(session, access, user_id, project_id, before=was, after={"role": str(role)})
    return row


def set_role(session: Session, access: Access, project_id: str, user_id: str, role: Role) -> Member:
    """As `put_member`, in a locked project, and without the row in the audit log."""
    # Takes the lock that the insert of the membership needs, before reading: a concurrent delete of the user
    # has either committed, or waits and then finds the membership.
    user = session.get(User, user_id, with_for_update={"read": True, "key_share": True})
    if user is None or user.deleted_at is not None:
        raise NotFound(f"no user {user_id}")
    row = session.get(Member, (project_id, user_id), populate_existing=True)
    if row is None:
        row_limits.require_room(session, Member, project_id)
        row = Member(
            project_id=project_id,
            user_id=user_id,
            role=role,
            by_admin=access.caller.is_admin,
            created_at=now(),
        )
        session.add(row)
    row.role = role
    row.by_admin = row.by_admin or access.caller.is_admin
    session.flush()
    return row


def delete_member(session: Session, access: Access, project_id: str, user_id: str) -> None:
    """Remove a user from the project and revoke their keys of it.

    Owners may remove anybody. A signed-on user may leave, since an owner can add users without asking.

    Raises:
        NotFound: no such project, or the user is not a member.
        Forbidden: the caller is neither an owner nor the user.
    """
    locked(session, access, project_id)
    is_self = access.caller.kind == "user" and access.caller.user_id == user_id
    if not is_self and not access.caller.may(Permission.OWN, project_id):
        raise lacking(Permission.OWN)
    row = session.get(Member, (project_id, user_id))
    if row is None:
        raise NotFound(f"no member {user_id} in this project")
    remove_member(session, row)
    audit_log.record(session, access, user_id, project_id, before={"role": str(row.role)})


def remove_member(session: Session, row: Member) -> None:
    """Delete a membership and revoke the user's keys of the project, without a row in the audit log."""
    session.delete(row)
    of_member = (ApiKey.project_id == row.project_id) & (ApiKey.user_id == row.user_id)
    api_keys.revoke_all(session, of_member)
