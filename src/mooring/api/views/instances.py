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
from mooring.schemas.instances import Granted, Instance


def instance(session: Session, row: tables.Instance, positions: Mapping[str, int]) -> Json:
    """Return an instance as JSON.

    Args:
        positions: positions in the queue by instance id (`SchedulerCache.positions`).
    """
    (shown,) = stable_fields(session, [row])
    has_position = row.state is State.PENDING and was_considered(row)
    return {**shown, "queue_position": positions.get(row.id) if has_position else None}


def was_considered(row: tables.Instance) -> bool:
    """Return whether a scheduling cycle has considered the instance, which has no queue position before."""
    return row.reason is not None and row.reason["code"] != QUEUED.code


def stable_fields(session: Session, rows: Sequence[tables.Instance]) -> list[Json]:
    """Return all fields of each instance but the queue position. They change only together with `version`.

    Uses at most three queries for all rows.
    """
    with_devices = [row.id for row in rows if row.gpu_count and row.state in HOLDS_GPUS]
    devices = gpu_views.devices(session, with_devices) if with_devices else {}
    names = gpu_views.node_names(session, {row.node_id for row in rows if row.node_id})
    full_specs = specs.whole(session, rows)
    return [
        _instance(row, full_specs[row.id], devices.get(row.id, []), names.get(row.node_id or ""))
        for row in rows
    ]


def _instance(row: tables.Instance, spec: Json, devices: list[Json], node_name: str | None) -> Json:
    fields = show(
        Instance,
        row,
        _NOT_OF_ROW,
        node_name=node_name,
        granted=_granted(row),
        devices=devices,
        actions=actions(row.state),
    )
    return {**spec, **fields}


# Fields that `instance` adds or that come from the spec, even where a column has the name of such a field.
_NOT_OF_ROW = frozenset(InstanceSpec.model_fields) | {"queue_position"}
# Fields of `Granted` that come from the column `placed_as`.
_PLACED_AS = Granted.model_fields.keys() - {"cpus", "memory_mib", "disk_mib"}


def _granted(row: tables.Instance) -> Json | None:
    """Return the granted resources. Earlier releases stored no `placed_as`, and allocated whole GPUs only."""
    if row.node_id is None or row.cpu_milli is None:
        return None
    defaults = {"isolation": "exclusive" if row.gpu_count else None, "borrowed": False}
    placed_as = dict.fromkeys(_PLACED_AS) | defaults | (row.placed_as or {})
    return show(Granted, row, cpus=row.cpu_milli / 1000, **placed_as)
