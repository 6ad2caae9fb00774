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
    """Return an instance as JSON.

    Args:
        positions: positions in the queue by instance id (`SchedulerCache.positions`).
    """
    (shown,) = stable_fields(session, [row])
    waits = row.state is State.PENDING and was_considered(row)
    return {**shown, "queue_position": positions.get(row.id) if waits else None}


def was_considered(row: tables.Instance) -> bool:
    """Return whether a scheduling cycle has considered it. Before that it shows no queue position."""
    return row.reason is not None and row.reason["code"] != QUEUED.code


def stable_fields(session: Session, rows: Sequence[tables.Instance]) -> list[Json]:
    """Return all fields but the queue position. They change only together with `version`.

    Uses at most three queries for all rows.
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
        _FROM_SPEC,
        node_name=node_name,
        granted=granted,
        devices=devices,
        actions=actions(row.state),
    )
    return {**spec, **own}


# Fields that come from the spec, not from a column; some columns have the name of such a field.
_FROM_SPEC = frozenset(InstanceSpec.model_fields) | {"queue_position"}


def _placed_as(row: tables.Instance) -> Json:
    """Return how it was placed. Earlier releases stored nothing and allocated whole GPUs only."""
    exclusive = "exclusive" if row.gpu_count else None
    placed = row.placed_as or {}
    return {
        "isolation": placed.get("isolation", exclusive),
        "link_score": placed.get("link_score"),
        "borrowed": placed.get("borrowed", False),
    }
