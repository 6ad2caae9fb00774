"""Instance groups as they are shown: the group's row, and what follows from its members."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.api.views import gpus as gpu_views
from mooring.api.views.show import show
from mooring.control.instances import gangs, instance_groups
from mooring.core.group import group_actions
from mooring.core.instance.state import State
from mooring.db import tables
from mooring.schemas.base import Json
from mooring.schemas.instance_groups import GroupMember, InstanceGroup

# Not their specs, which are the group's template.
_OF_A_MEMBER = (
    tables.Instance.id, tables.Instance.group_id, tables.Instance.group_rank, tables.Instance.name,
    tables.Instance.state, tables.Instance.reason, tables.Instance.node_id, tables.Instance.attempt,
    tables.Instance.exit_code, tables.Instance.version, tables.Instance.deleted_at,
)  # fmt: skip


def groups(
    session: Session, rows: Sequence[tables.InstanceGroup], positions: Mapping[str, int]
) -> list[Json]:
    """Some queries for all of them, however many."""
    members: dict[str, list[Any]] = defaultdict(list)
    query = select(*_OF_A_MEMBER).where(tables.Instance.group_id.in_([row.id for row in rows]))
    for member in session.execute(query.order_by(tables.Instance.group_id, tables.Instance.group_rank)):
        members[member.group_id].append(member)
    everyone = [member for of_one in members.values() for member in of_one]
    names = gpu_views.node_names(session, {member.node_id for member in everyone if member.node_id})
    layouts = gangs.layouts(session, [row.id for row in rows])
    return [_group(row, members[row.id], names, positions, layouts.get(row.id)) for row in rows]


def group(session: Session, row: tables.InstanceGroup, positions: Mapping[str, int]) -> Json:
    return groups(session, [row], positions)[0]


def _group(
    row: tables.InstanceGroup,
    members: Sequence[Row[Any]],
    names: dict[str, str],
    positions: Mapping[str, int],
    layout: gangs.Layout | None,
) -> Json:
    living = [member for member in members if member.deleted_at is None]
    state = instance_groups.state_of(row, [member.state for member in members])
    return show(
        InstanceGroup,
        row,
        network={"mode": row.network, "encrypted": row.encrypted, "used": layout.network if layout else None},
        state=state,
        reason=row.reason or _why_it_waits(living),
        queue_position=min((positions[each.id] for each in living if each.id in positions), default=None),
        members=[_member(member, names.get(member.node_id or "")) for member in living],
        actions=group_actions(state, row.desired_state),
        version=instance_groups.shown_version(row, members),
    )


def _why_it_waits(members: Sequence[Row[Any]]) -> Json | None:
    return next((member.reason for member in members if member.state is State.PENDING), None)


def _member(row: Row[Any], node_name: str | None) -> Json:
    return show(GroupMember, row, rank=row.group_rank, instance_id=row.id, node_name=node_name)
