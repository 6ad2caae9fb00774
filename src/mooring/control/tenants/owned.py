"""Rows that belong to a project for good and are deleted at once: its secrets and registries."""

from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.core.access import Access
from mooring.core.errors import NotFound
from mooring.db.tables import Registry, Secret

Owned = TypeVar("Owned", Secret, Registry)


def get(session: Session, access: Access, kind: type[Owned], row_id: str) -> Owned:
    """Raises NotFound, Forbidden: as `Access.require`."""
    return _let_in(session.get(kind, row_id), access, kind, row_id)


def locked(session: Session, access: Access, kind: type[Owned], row_id: str) -> Owned:
    """As `get`, for a change: of two deletes at once the second finds nothing."""
    row = session.scalar(select(kind).where(kind.id == row_id).with_for_update())
    return _let_in(row, access, kind, row_id)


def _let_in(row: Owned | None, access: Access, kind: type[Owned], row_id: str) -> Owned:
    missing = f"no {kind.__name__.lower()} {row_id}"
    if row is None:
        raise NotFound(missing)
    access.require(row.project_id, missing)
    return row
