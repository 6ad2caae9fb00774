"""Cards as they are shown, with what is given out of them, and what instances have of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.api.views import gpu_health as health_views
from mooring.api.views.show import show
from mooring.control.nodes.instance_types import InstanceShape
from mooring.core.access import Access
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.db import tables
from mooring.scheduler.model import GpuAllocation
from mooring.schemas.base import Json
from mooring.schemas.nodes import Gpu, InstanceType


def devices(session: Session, instance_ids: Sequence[str]) -> dict[str, list[Json]]:
    """Instance -> what it holds of cards."""
    gpu, held = tables.Gpu, tables.Allocation
    query = (
        select(held.instance_id, held.milli, held.mig_uuid, *_CARD)
        .join(gpu, gpu.uuid == held.gpu_uuid)
        .where(held.instance_id.in_(instance_ids), held.to_at.is_(None))
        .order_by(held.instance_id, gpu.index, held.mig_uuid)
    )
    found: dict[str, list[Json]] = defaultdict(list)
    for row in session.execute(query):
        found[row.instance_id].append(_device(row, row.milli, row.mig_uuid))
    return found


# A row's own `index` is the method of sequences.
_CARD = (tables.Gpu.uuid, tables.Gpu.index.label("place"), tables.Gpu.model, tables.Gpu.memory_mib)


def _device(card: Any, milli: int, mig_uuid: str | None) -> Json:
    return {
        "uuid": card.uuid,
        "index": card.place,
        "model": card.model,
        "memory_mib": card.memory_mib,
        "share": milli / WHOLE_MILLI,
        "mig_uuid": mig_uuid,
    }


def devices_of(session: Session, grants: Sequence[GpuAllocation]) -> list[Json]:
    """The devices of a placement that was not made."""
    query = select(*_CARD).where(tables.Gpu.uuid.in_({grant.gpu_uuid for grant in grants}))
    cards = {row.uuid: row for row in session.execute(query)}
    listed = [_device(cards[each.gpu_uuid], each.milli, each.mig_uuid) for each in grants]
    return sorted(listed, key=lambda device: (device["index"], device["mig_uuid"] or ""))


def node_names(session: Session, node_ids: set[str]) -> dict[str, str]:
    if not node_ids:
        return {}
    query = select(tables.Node.id, tables.Node.name).where(tables.Node.id.in_(node_ids))
    return dict(session.execute(query).all())


def gpus(session: Session, access: Access, rows: Sequence[tables.Gpu]) -> list[Json]:
    """GPUs with their holders, as far as those are the caller's business."""
    names = node_names(session, {row.node_id for row in rows})
    given = _given(session, [row.uuid for row in rows])
    conditions = health_views.conditions_of(session, [row.uuid for row in rows])
    return [
        _gpu(row, names.get(row.node_id, ""), given.get(row.uuid, []), conditions.get(row.uuid, []), access)
        for row in rows
    ]


def _given(session: Session, uuids: Sequence[str]) -> dict[str, list[tables.Allocation]]:
    """What is given out of each card now."""
    held = tables.Allocation
    query = select(held).where(held.gpu_uuid.in_(uuids), held.to_at.is_(None)).order_by(held.id)
    given: dict[str, list[tables.Allocation]] = defaultdict(list)
    for row in session.scalars(query):
        given[row.gpu_uuid].append(row)
    return given


def _gpu(
    row: tables.Gpu,
    node_name: str,
    given: Sequence[tables.Allocation],
    conditions: Sequence[tables.GpuCondition],
    access: Access,
) -> Json:
    facts = row.facts
    own = [each for each in given if access.caller.sees(each.project_id)]
    only = given[0].instance_id if len({each.instance_id for each in given}) == 1 and own else None
    return show(
        Gpu,
        row,
        node_name=node_name,
        **{name: facts.get(name) for name in _FACTS},
        nvlink_peers=facts.get("nvlink_peers", []),
        mig_devices=_mig_devices(facts, given, own),
        **health_views.health(row, conditions, access),
        share_free=(WHOLE_MILLI - row.milli_held) / WHOLE_MILLI,
        instance_id=only,
        holders=[_holder(each) for each in own],
    )


_FACTS = ("pci_bus_id", "numa_node", "compute_capability", "mig_mode")


def _holder(given: tables.Allocation) -> Json:
    return {
        "instance_id": given.instance_id,
        "share": given.milli / WHOLE_MILLI,
        "mig_uuid": given.mig_uuid,
    }


def _mig_devices(
    facts: Json, given: Sequence[tables.Allocation], own: Sequence[tables.Allocation]
) -> list[Json]:
    taken = {each.mig_uuid for each in given}
    holders: dict[Any, str] = {each.mig_uuid: each.instance_id for each in own}
    return [
        {**device, "free": device["uuid"] not in taken, "instance_id": holders.get(device["uuid"])}
        for device in facts.get("mig_devices", ())
    ]


def samples(session: Session, access: Access, uuids: Sequence[str]) -> list[Json]:
    """The newest sample of each GPU, as its node last told it; a silent node's would not be live.

    It may be older than the GPU's present holder: processes are shown to their own project and to admins.
    """
    gpu, node = tables.Gpu, tables.Node
    query = select(node).where(
        node.id.in_(select(gpu.node_id).where(gpu.uuid.in_(uuids))),
        node.silent.is_(False),
        node.deleted_at.is_(None),
    )
    wanted = set(uuids)
    found = [sample for row in session.scalars(query) for sample in row.samples if sample["uuid"] in wanted]
    shown = found if access.caller.is_admin else _with_own_processes(session, access, found)
    return sorted(shown, key=lambda sample: (sample["index"], sample["uuid"]))


def _with_own_processes(session: Session, access: Access, samples: Sequence[Json]) -> list[Json]:
    """The samples without processes that are others', or nobody's; null, where a card tells none, stays."""
    told = {one["instance_id"] for sample in samples for one in sample["processes"] or ()}
    query = select(tables.Instance.id, tables.Instance.project_id).where(
        tables.Instance.id.in_(told - {None})
    )
    own = {
        instance_id for instance_id, project_id in session.execute(query) if access.caller.sees(project_id)
    }
    return [
        {**sample, "processes": [one for one in sample["processes"] if one["instance_id"] in own]}
        if sample["processes"]
        else sample
        for sample in samples
    ]


def instance_type(kind: InstanceShape) -> Json:
    words = kind.gpu_model.removeprefix("NVIDIA ").lower().split()
    name = f"{'-'.join(words)}-{kind.mig_profile or f'x{kind.gpu_count}'}"
    return show(InstanceType, kind, name=name, price_micros_per_hour=None, currency=None)
