"""Limits on the number of rows per project, far above normal use, to protect the shared database."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mooring.db.tables import ApiKey, Member, Registry, Secret, Template, Volume, Webhook
from mooring_client.errors import TooManyRows

Kind = (
    type[ApiKey]
    | type[Member]
    | type[Registry]
    | type[Secret]
    | type[Template]
    | type[Volume]
    | type[Webhook]
)
LIMITS: Final[Mapping[Kind, tuple[int, str]]] = {
    ApiKey: (1000, "API keys"),
    Member: (1000, "members"),
    Registry: (100, "registries"),
    Secret: (1000, "secrets"),
    Template: (200, "templates"),
    Webhook: (20, "webhooks"),
    Volume: (1000, "volumes"),
}


def require_room(session: Session, kind: Kind, project_id: str | None) -> None:
    """Check that a project may have one more row. Exact only if the caller has locked the project.

    Raises:
        TooManyRows: the project has the maximum number.
    """
    query = select(func.count()).select_from(kind).where(kind.project_id == project_id)
    if kind is ApiKey:
        query = query.where(ApiKey.revoked_at.is_(None))
    most, name = LIMITS[kind]
    if (session.scalar(query) or 0) >= most:
        raise TooManyRows(f"a project can have {most} {name}; delete what is not used")
