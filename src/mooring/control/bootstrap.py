"""Creates what a control plane needs before its first request: identity, project, templates, admin key."""

from dataclasses import dataclass
from secrets import token_bytes

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from mooring.control.tenants import api_keys, projects, shipped_templates
from mooring.core import ids
from mooring.db.tables import ControlPlane, Project
from mooring.db.types import new_id, now

DEFAULT_PROJECT = "default"


@dataclass(frozen=True, slots=True)
class ControlPlaneIdentity:
    """The identity of a control plane; fixed for the life of its database."""

    control_plane_id: str
    default_project_id: str
    cursor_secret: bytes


def ensure(session: Session, admin_key: str | None) -> tuple[ControlPlaneIdentity, str | None]:
    """Create what is missing, once, even if several replicas start at the same time.

    Returns:
        The identity, and the admin key if it was just created; it is shown only this once.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('mooring.bootstrap'))"))
    control_plane = _control_plane(session)
    identity = ControlPlaneIdentity(
        control_plane_id=control_plane.id,
        default_project_id=_default_project(session).id,
        cursor_secret=control_plane.cursor_secret,
    )
    shipped_templates.install(session)
    return identity, api_keys.install_admin_key(session, admin_key)


def _control_plane(session: Session) -> ControlPlane:
    row = session.scalar(select(ControlPlane))
    if row is None:
        row = ControlPlane(id=new_id(ids.CONTROL_PLANE), cursor_secret=token_bytes(32), created_at=now())
        session.add(row)
    return row


def default_project_id(session: Session) -> str:
    """The project of callers that may use all and name none, in a database that has one."""
    query = select(Project.id).where(Project.name == DEFAULT_PROJECT, Project.deleted_at.is_(None))
    return session.scalars(query).one()


def _default_project(session: Session) -> Project:
    row = session.scalar(select(Project).where(Project.name == DEFAULT_PROJECT, Project.deleted_at.is_(None)))
    if row is None:
        row = projects.new(DEFAULT_PROJECT, {})
        row.local_images = True  # a single user can run local builds without a registry
        session.add(row)
    return row
