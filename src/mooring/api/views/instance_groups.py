"""Instance groups as the API shows them, with their members."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.api.views import gpus as gpu_views
from mooring.api.views.show import show
from mooring.control.instances import gangs, instance_groups
from mooring.core.group import group_actions
from mooring.db import tables
from mooring_client.schemas.base import Json
from mooring_client.schemas.instance_groups import GroupMember, InstanceGroup
from mooring_client.schemas.states import State

# Without the specs, which equal the group's template.
_MEMBER_COLUMNS = (
    tables.Instance.id, tables.Instance.group_id, tables.Instance.group_rank, tables.Instance.name,
    tables.Instance.state, tables.Instance.reason, tables.Instance.node_id, tables.Instance.attempt,
    tables.Instance.exit_code, tables.Instance.version, tables.Instance.deleted_at,
)  # fmt: skip


def groups(
    session: Session, rows: Sequence[tables.InstanceGroup], positions: Mapping[str, int]
) -> list[Json]:
    """Return groups as JSON. The number of queries does not depend on the number of groups."""
    members: dict[str, list[Any]] = defaultdict(list)
    query = select(*_MEMBER_COLUMNS).where(tables.Instance.group_id.in_([row.id for row in rows]))
    for member in session.execute(query.order_by(tables.Instance.group_id, tables.Instance.group_rank)):
        members[member.group_id].append(member)
    every_member = [member for of_one in members.values() for member in of_one]
    names = gpu_views.node_names(session, {member.node_id for member in every_member if member.node_id})
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
    present = [member for member in members if member.deleted_at is None]
    state = instance_groups.state_of(row, [member.state for member in members])
    return show(
        InstanceGroup,
        row,
        network={"mode": row.network, "encrypted": row.encrypted, "used": layout.network if layout else None},
        state=state,
        reason=row.reason or _waiting_reason(present),
        queue_position=min((positions[each.id] for each in present if each.id in positions), default=None),
        members=[_member(member, names.get(member.node_id or "")) for member in present],
        actions=group_actions(state, row.desired_state),
        version=instance_groups.shown_version(row, members),
    )


def _waiting_reason(members: Sequence[Row[Any]]) -> Json | None:
    return next((member.reason for member in members if member.state is State.PENDING), None)


def _member(row: Row[Any], node_name: str | None) -> Json:
    return show(GroupMember, row, rank=row.group_rank, instance_id=row.id, node_name=node_name)
