"""Names of instances, unique among the live ones of a project."""

import re
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session
from ulid import ULID

from mooring.core.errors import NameTaken
from mooring.db.tables import Instance


def generated(image: str) -> str:
    """A name for what was given none, after its image."""
    repository = image.split("@", maxsplit=1)[0].rsplit("/", 1)[-1].split(":", maxsplit=1)[0].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", repository).strip("-")[:48]
    return f"{stem}-{str(ULID())[-8:].lower()}"


def require_free_names(session: Session, project_id: str, names: Sequence[str]) -> None:
    """Raises NameTaken."""
    # The unique index is the authority; this makes the common case a plain answer.
    query = select(Instance.name).where(Instance.project_id == project_id, Instance.name.in_(names))
    taken = session.scalar(query.where(Instance.deleted_at.is_(None)).order_by(Instance.name).limit(1))
    if taken is not None:
        raise NameTaken(f"an instance named {taken} exists; delete it or choose another name", name=taken)
