"""The templates that come with Mooring: files in `src/mooring/shipped_templates`, stored at the first start.

From then on they are an admin's: a changed one is not changed again, a deleted one does not come back. One
that nobody has changed follows the file of a newer release.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml
from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.core import ids
from mooring.db.tables import Template
from mooring.db.types import new_id, now
from mooring_client.schemas.templates import TemplateApply

_FIELDS = ("description", "parameters", "spec")


@cache
def files() -> Mapping[str, TemplateApply]:
    """The templates by name, as an admin would apply them."""
    folder = resources.files("mooring") / "shipped_templates"
    return {
        file.name.removesuffix(".yaml"): TemplateApply(scope="global", **yaml.safe_load(file.read_text()))
        for file in sorted(folder.iterdir(), key=lambda each: each.name)
        if file.name.endswith(".yaml")
    }


def install(session: Session) -> None:
    """Store new ones, and newer forms of those that nobody has changed or deleted."""
    stored = {
        row.shipped: row for row in session.scalars(select(Template).where(Template.shipped.is_not(None)))
    }
    taken = set(
        session.scalars(
            select(Template.name).where(Template.project_id.is_(None), Template.deleted_at.is_(None))
        )
    )
    for name, request in files().items():
        fields = request.model_dump(mode="json", include=set(_FIELDS))
        row = stored.get(name)
        if row is None and name not in taken:
            session.add(_new(name, fields))
        elif row is not None and row.version == 1 and row.deleted_at is None:
            for field, value in fields.items():
                setattr(row, field, value)


def _new(name: str, fields: dict[str, Any]) -> Template:
    return Template(
        id=new_id(ids.TEMPLATE),
        project_id=None,
        name=name,
        shipped=name,
        version=1,
        created_at=now(),
        **fields,
    )
