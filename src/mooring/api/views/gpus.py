"""GPUs as the API shows them, their allocations, and the devices of instances."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.api.views import gpu_health as health_views
from mooring.api.views.show import show
from mooring.control.nodes.instance_types import InstanceShape
from mooring.core.access import Access
from mooring.db import tables
from mooring.scheduler.model import GpuAllocation
from mooring_client.schemas.base import Json
from mooring_client.schemas.nodes import Gpu, InstanceType
from mooring_client.schemas.spec import WHOLE_MILLI


def devices(session: Session, instance_ids: Sequence[str]) -> dict[str, list[Json]]:
    """Return the allocated devices of each instance by id."""
    gpu, allocation = tables.Gpu, tables.Allocation
    query = (
        select(allocation.instance_id, allocation.milli, allocation.mig_uuid, *_GPU_COLUMNS)
        .join(gpu, gpu.uuid == allocation.gpu_uuid)
        .where(
            allocation.instance_id.in_(instance_ids),
            allocation.to_at.is_(None),
            allocation.lost_node_id.is_(None),
        )
        .order_by(allocation.instance_id, gpu.index, allocation.mig_uuid)
    )
    found: dict[str, list[Json]] = defaultdict(list)
    for row in session.execute(query):
        found[row.instance_id].append(_device(row, row.milli, row.mig_uuid))
    return found


# The label, because a row already has a method `index`.
_GPU_COLUMNS = (tables.Gpu.uuid, tables.Gpu.index.label("gpu_index"), tables.Gpu.model, tables.Gpu.memory_mib)


def _device(gpu: Any, milli: int, mig_uuid: str | None) -> Json:
    return {
        "uuid": gpu.uuid,
        "index": gpu.gpu_index,
        "model": gpu.model,
        "memory_mib": gpu.memory_mib,
        "share": milli / WHOLE_MILLI,
        "mig_uuid": mig_uuid,
    }


def devices_of(session: Session, allocations: Sequence[GpuAllocation]) -> list[Json]:
    """Return the devices of a dry run's placement."""
    query = select(*_GPU_COLUMNS).where(tables.Gpu.uuid.in_({each.gpu_uuid for each in allocations}))
    gpus_by_uuid = {row.uuid: row for row in session.execute(query)}
    listed = [_device(gpus_by_uuid[each.gpu_uuid], each.milli, each.mig_uuid) for each in allocations]
    return sorted(listed, key=lambda device: (device["index"], device["mig_uuid"] or ""))


def node_names(session: Session, node_ids: set[str]) -> dict[str, str]:
    if not node_ids:
        return {}
    query = select(tables.Node.id, tables.Node.name).where(tables.Node.id.in_(node_ids))
    return dict(session.execute(query).all())


def gpus(
    session: Session, access: Access, rows: Sequence[tables.Gpu], *, sampled: bool = False
) -> list[Json]:
    """Return GPUs, with those of their holders that the caller may see.

    Args:
        sampled: show the newest metrics of each, except those that `get_gpu_metrics` hides.
    """
    names = node_names(session, {row.node_id for row in rows})
    used = _allocations(session, [row.uuid for row in rows])
    conditions = health_views.conditions_of(session, [row.uuid for row in rows])
    measured = [
        row.uuid
        for row in rows
        if sampled and all(access.caller.sees(each.project_id) for each in used.get(row.uuid, ()))
    ]
    found = {sample["uuid"]: sample for sample in samples(session, access, measured)} if measured else {}
    return [
        _gpu(
            row,
            names.get(row.node_id, ""),
            used.get(row.uuid, []),
            conditions.get(row.uuid, []),
            found.get(row.uuid),
            access,
        )
        for row in rows
    ]


def _allocations(session: Session, uuids: Sequence[str]) -> dict[str, list[tables.Allocation]]:
    """Return the live allocations of each GPU by UUID."""
    allocation = tables.Allocation
    query = select(allocation).where(allocation.gpu_uuid.in_(uuids), allocation.to_at.is_(None))
    found: dict[str, list[tables.Allocation]] = defaultdict(list)
    for row in session.scalars(query.order_by(allocation.id)):
        found[row.gpu_uuid].append(row)
    return found


def _gpu(
    row: tables.Gpu,
    node_name: str,
    allocated: Sequence[tables.Allocation],
    conditions: Sequence[tables.GpuCondition],
    sample: Json | None,
    access: Access,
) -> Json:
    facts = row.facts
    own = [each for each in allocated if access.caller.sees(each.project_id)]
    is_shared = len({each.instance_id for each in allocated}) > 1
    return show(
        Gpu,
        row,
        node_name=node_name,
        **{name: facts.get(name) for name in _FACTS},
        nvlink_peers=facts.get("nvlink_peers", []),
        mig_devices=_mig_devices(facts, allocated, own),
        **health_views.health(row, conditions, access),
        share_free=(WHOLE_MILLI - row.milli_held) / WHOLE_MILLI,
        instance_id=own[0].instance_id if own and not is_shared else None,
        holders=[_holder(each) for each in own],
        sample=sample,
    )


_FACTS = ("pci_bus_id", "numa_node", "compute_capability", "mig_mode")


def _holder(allocation: tables.Allocation) -> Json:
    return {
        "instance_id": allocation.instance_id,
        "share": allocation.milli / WHOLE_MILLI,
        "mig_uuid": allocation.mig_uuid,
    }


def _mig_devices(
    facts: Json, allocated: Sequence[tables.Allocation], own: Sequence[tables.Allocation]
) -> list[Json]:
    taken = {each.mig_uuid for each in allocated}
    holders: dict[Any, str] = {each.mig_uuid: each.instance_id for each in own}
    return [
        {**device, "free": device["uuid"] not in taken, "instance_id": holders.get(device["uuid"])}
        for device in facts.get("mig_devices", ())
    ]


def samples(session: Session, access: Access, uuids: Sequence[str]) -> list[Json]:
    """Return the newest sample of each GPU, except those of silent nodes.

    Processes are shown only to their own project and to admins, as a sample may predate the allocation.
    """
    gpu, node = tables.Gpu, tables.Node
    query = select(node.samples).where(
        node.id.in_(select(gpu.node_id).where(gpu.uuid.in_(uuids))),
        node.silent.is_(False),
        node.deleted_at.is_(None),
    )
    wanted = set(uuids)
    found = [sample for read in session.scalars(query) for sample in read if sample["uuid"] in wanted]
    shown = found if access.caller.is_admin else _with_own_processes(session, access, found)
    return sorted(shown, key=lambda sample: (sample["index"], sample["uuid"]))


def _with_own_processes(session: Session, access: Access, samples: Sequence[Json]) -> list[Json]:
    """Remove processes that are not of the caller's projects. Null (the GPU reports none) stays null."""
    reported = {one["instance_id"] for sample in samples for one in sample["processes"] or ()}
    query = select(tables.Instance.id, tables.Instance.project_id).where(
        tables.Instance.id.in_(reported - {None})
    )
    own = {row.id for row in session.execute(query) if access.caller.sees(row.project_id)}
    return [
        {**sample, "processes": [one for one in sample["processes"] if one["instance_id"] in own]}
        if sample["processes"]
        else sample
        for sample in samples
    ]


def instance_type(shape: InstanceShape) -> Json:
    words = shape.gpu_model.removeprefix("NVIDIA ").lower().split()
    name = f"{'-'.join(words)}-{shape.mig_profile or f'x{shape.gpu_count}'}"
    return show(InstanceType, shape, name=name, price_micros_per_hour=None, currency=None)
