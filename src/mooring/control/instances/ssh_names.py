"""The user name of an SSH client names an instance: `ins_…`, `name`, or `name.project`."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.core import ids
from mooring.core.access import Access
from mooring.db.tables import Instance, Project

_MOST = 20  # of the names in an error message


def is_unique(name: str) -> bool:
    """Whether the name means the same instance for everybody."""
    return _is_id(name) or "." in name


def _is_id(name: str) -> bool:
    return name.startswith(f"{ids.INSTANCE}_")


def matching(session: Session, access: Access, name: str) -> Sequence[tuple[Instance, str]]:
    """The live instances that the name can mean, with the name of the project, among those of the access."""
    query = (
        select(Instance, Project.name)
        .join(Project, Project.id == Instance.project_id)
        .where(Instance.deleted_at.is_(None))
        .order_by(Instance.id)
        .limit(_MOST)
    )
    if access.projects is not None:
        query = query.where(Instance.project_id.in_(access.projects))
    if _is_id(name):
        query = query.where(Instance.id == name)
    else:
        instance, _, project = name.partition(".")
        query = query.where(Instance.name == instance)
        if project:
            query = query.where(Project.name == project)
    return [(row, project) for row, project in session.execute(query)]
