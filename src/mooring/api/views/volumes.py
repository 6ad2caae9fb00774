"""Volumes as the API shows them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.api.views.show import show
from mooring.control.volumes import volumes
from mooring.db import tables
from mooring_client.schemas.base import Json
from mooring_client.schemas.volumes import Volume, VolumeCopy, VolumeUser

_MOST_LISTED = 200


def of_rows(session: Session, rows: Sequence[tables.Volume]) -> list[Json]:
    """Return volumes as JSON, with three queries for all of them."""
    ids = [row.id for row in rows]
    copies: dict[str, list[tables.NodeVolume]] = defaultdict(list)
    for copy in volumes.copies(session, ids):
        if copy.size_enforced is not None:  # otherwise the node has not created it yet, or has emptied it
            copies[copy.volume_id].append(copy)
    node_ids = {copy.node_id for of_volume in copies.values() for copy in of_volume}
    nodes = _nodes(session, node_ids | {row.node_id for row in rows if row.node_id})
    users = _users(session, ids)
    return [_volume(row, copies[row.id], nodes, users[row.id]) for row in rows]


def _nodes(session: Session, node_ids: set[str]) -> dict[str, Row[Any]]:
    node = tables.Node
    query = select(node.id, node.name, node.silent, node.deleted_at).where(node.id.in_(node_ids))
    return {row.id: cast(Row[Any], row) for row in session.execute(query)}


def _users(session: Session, volume_ids: Sequence[str]) -> dict[str, list[Json]]:
    mount, instance = tables.InstanceVolume, tables.Instance
    query = (
        select(mount.volume_id, mount.path, mount.read_only, instance.id, instance.name, instance.state)
        .join(instance, instance.id == mount.instance_id)
        .where(mount.volume_id.in_(volume_ids), instance.deleted_at.is_(None))
        .order_by(instance.id.desc(), mount.position)
    )
    found: dict[str, list[Json]] = defaultdict(list)
    for row in session.execute(query):
        if len(found[row.volume_id]) < _MOST_LISTED:
            found[row.volume_id].append(
                show(VolumeUser, row, instance_id=row.id, instance_name=row.name, state=str(row.state))
            )
    return found


def _volume(
    row: tables.Volume,
    copies: Sequence[tables.NodeVolume],
    nodes: Mapping[str, Row[Any]],
    mounted_by: list[Json],
) -> Json:
    used = [copy.used_mib for copy in copies if copy.used_mib is not None]
    return show(
        Volume,
        row,
        used_mib=max(used, default=None),
        size_enforced=bool(copies) and all(copy.size_enforced for copy in copies),
        node_name=nodes[row.node_id].name if row.node_id else None,
        state=_state(row, nodes),
        copies=[show(VolumeCopy, copy, node_name=nodes[copy.node_id].name) for copy in copies[:_MOST_LISTED]],
        mounted_by=mounted_by,
    )


def _state(row: tables.Volume, nodes: Mapping[str, Row[Any]]) -> str:
    if row.deleted_at is not None:
        return "deleting"
    node = nodes[row.node_id] if row.node_id else None
    is_lost = node is not None and (node.silent or node.deleted_at is not None)
    return "unavailable" if is_lost else "available"
