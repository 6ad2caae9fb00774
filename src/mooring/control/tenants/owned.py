"""Access to rows that a project owns and that are deleted outright: secrets, registries and
webhooks. A webhook without a project is an admin's.
"""

from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.core.access import Access
from mooring.db.tables import Registry, Secret, Webhook
from mooring_client.errors import NotFound

Owned = TypeVar("Owned", Secret, Registry, Webhook)


def get(session: Session, access: Access, kind: type[Owned], row_id: str) -> Owned:
    """Raises NotFound, Forbidden: as `Access.require`."""
    return _visible(session.get(kind, row_id), access, kind, row_id)


def locked(session: Session, access: Access, kind: type[Owned], row_id: str) -> Owned:
    """As `get`, with the row locked: of two concurrent deletes the second raises NotFound."""
    row = session.scalar(select(kind).where(kind.id == row_id).with_for_update())
    return _visible(row, access, kind, row_id)


def _visible(row: Owned | None, access: Access, kind: type[Owned], row_id: str) -> Owned:
    missing = f"no {kind.__name__.lower()} {row_id}"
    if row is None:
        raise NotFound(missing)
    access.require(row.project_id, missing)
    return row
