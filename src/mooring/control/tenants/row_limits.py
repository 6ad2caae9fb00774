"""How many rows one project may fill: nobody needs so many, and each costs everybody's database."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mooring.core.errors import Conflict
from mooring.db.tables import ApiKey, Member, Registry, Secret

Kind = type[ApiKey] | type[Member] | type[Registry] | type[Secret]
MOST: Final[Mapping[Kind, tuple[int, str]]] = {
    ApiKey: (1000, "API keys"),
    Member: (1000, "members"),
    Registry: (100, "registries"),
    Secret: (1000, "secrets"),
}


def require_room(session: Session, kind: Kind, project_id: str | None) -> None:
    """Let one more of its kind into a project. Where the caller has not locked it, a few too many may pass.

    Raises:
        Conflict: code `too_many`.
    """
    query = select(func.count()).select_from(kind).where(kind.project_id == project_id)
    if kind is ApiKey:
        query = query.where(ApiKey.revoked_at.is_(None))
    most, name = MOST[kind]
    if (session.scalar(query) or 0) >= most:
        raise Conflict(f"a project can have {most} {name}; delete what is not used", code="too_many")
