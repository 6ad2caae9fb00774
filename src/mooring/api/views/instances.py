"""Instances as the API shows them."""

from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from mooring.api.views import gpus as gpu_views
from mooring.api.views.show import show
from mooring.control.instances import specs
from mooring.control.instances.instances import QUEUED
from mooring.core.instance.spec import InstanceSpec
from mooring.core.instance.state import HOLDS_GPUS, State, actions
from mooring.db import tables
from mooring.schemas.base import Json
from mooring.schemas.instances import Instance


def instance(session: Session, row: tables.Instance, positions: Mapping[str, int]) -> Json:
    """One instance as it is now.

    Args:
        positions: in the queue, of those that wait (`World.positions`).
    """
    (shown,) = lasting(session, [row])
    waits = row.state is State.PENDING and was_looked_at(row)
    return {**shown, "queue_position": positions.get(row.id) if waits else None}


def was_looked_at(row: tables.Instance) -> bool:
    """A place in the queue is told from the scheduler's first look on; most are placed by that look."""
    return row.reason is not None and row.reason["code"] != QUEUED.code


def lasting(session: Session, rows: Sequence[tables.Instance]) -> list[Json]:
    """All that stays the same for as long as the version does: all but the place in the queue.

    Three queries at most, however many rows.
    """
    holders = [row.id for row in rows if row.gpu_count and row.state in HOLDS_GPUS]
    devices = gpu_views.devices(session, holders) if holders else {}
    names = gpu_views.node_names(session, {row.node_id for row in rows if row.node_id})
    whole = specs.whole(session, rows)
    return [
        _instance(row, whole[row.id], devices.get(row.id, []), names.get(row.node_id or "")) for row in rows
    ]


def _instance(row: tables.Instance, spec: Json, devices: list[Json], node_name: str | None) -> Json:
    granted = None
    if row.node_id is not None and row.cpu_milli is not None:
        granted = {"cpus": row.cpu_milli / 1000, "memory_mib": row.memory_mib, "disk_mib": row.disk_mib}
        granted |= _placed_as(row)
    own = show(
        Instance,
        row,
        _NOT_OF_ROW,
        node_name=node_name,
        granted=granted,
        devices=devices,
        actions=actions(row.state),
    )
    return {**spec, **own}


# A spec that an earlier release stored may lack a field, and some columns have a spec's field's name.
_NOT_OF_ROW = frozenset(InstanceSpec.model_fields) | {"queue_position"}


def _placed_as(row: tables.Instance) -> Json:
    """What was placed by an earlier release was given whole cards."""
    exclusive = "exclusive" if row.gpu_count else None
    placed = row.placed_as or {}
    return {
        "isolation": placed.get("isolation", exclusive),
        "link_score": placed.get("link_score"),
        "borrowed": placed.get("borrowed", False),
    }
