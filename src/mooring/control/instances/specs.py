"""Specs of group members: the fields that all members share are stored once, in the group's template.

A member's row has the fields that SQL queries read. Members made by an earlier release have all fields in
their own row; this module reads both kinds of rows.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.db.tables import Instance, InstanceGroup
from mooring.db.types import JsonObject

# Fields that no query reads and that may be large.
SHARED: Final = frozenset({"env", "command", "entrypoint", "working_dir", "user", "ports"})


def own_part(spec: JsonObject) -> JsonObject:
    """The part of a spec that a member's row stores."""
    return {name: value for name, value in spec.items() if name not in SHARED}


def whole(session: Session, rows: Sequence[Instance]) -> dict[str, JsonObject]:
    """The complete specs of instances by id; takes one query if any of them is a group member."""
    groups = {row.group_id for row in rows if row.group_id is not None and not row.spec.keys() >= SHARED}
    templates: dict[str, Any] = {}
    if groups:
        query = select(InstanceGroup.id, InstanceGroup.template).where(InstanceGroup.id.in_(groups))
        templates = dict(session.execute(query).all())
    return {row.id: _joined(row.spec, templates.get(row.group_id or "")) for row in rows}


def _joined(own: JsonObject, template: JsonObject | None) -> JsonObject:
    if template is None:
        return own
    # The template's own fields come first only for the order, which is then that of all specs.
    ordered = {name: value for name, value in template.items() if name in SHARED or name in own}
    return {**ordered, **own}
