"""GPU allocations: made at a placement, released when the container is confirmed gone."""

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Allocation, Instance
from mooring.db.types import now
from mooring.scheduler.model import GpuAllocation


def allocate(session: Session, row: Instance, gpus: Iterable[GpuAllocation]) -> None:
    """Raises IntegrityError if a GPU would be allocated twice: see the triggers of migration 0003."""
    if rows := entries(row.id, row.project_id, row.attempt, gpus):
        session.execute(insert(Allocation), rows)


def entries(
    instance_id: str, project_id: str, attempt: int, gpus: Iterable[GpuAllocation]
) -> list[dict[str, Any]]:
    """The rows of `allocations` for a placement that begins now."""
    from_at = now()
    return [
        {
            "gpu_uuid": gpu.gpu_uuid, "instance_id": instance_id, "project_id": project_id,
            "attempt": attempt, "milli": gpu.milli, "mig_uuid": gpu.mig_uuid, "from_at": from_at,
        }
        for gpu in gpus
    ]  # fmt: skip


def of_instances(session: Session, instance_ids: Iterable[str]) -> dict[str, list[GpuAllocation]]:
    """The present allocations of instances, by instance id."""
    found: dict[str, list[GpuAllocation]] = {}
    columns = (Allocation.instance_id, Allocation.gpu_uuid, Allocation.milli, Allocation.mig_uuid)
    query = select(*columns).where(
        Allocation.instance_id.in_(set(instance_ids)),
        Allocation.to_at.is_(None),
        Allocation.lost_node_id.is_(None),
    )
    for instance_id, uuid, milli, mig_uuid in session.execute(query.order_by(Allocation.id)):
        found.setdefault(instance_id, []).append(GpuAllocation(uuid, milli, mig_uuid))
    return found


def renew(session: Session, row: Instance) -> None:
    """Allocate the same GPUs to a new attempt: its rows begin where those of the last attempt end."""
    gpus = of_instances(session, [row.id]).get(row.id, [])
    release(session, row)
    allocate(session, row, gpus)


def release(session: Session, row: Instance) -> None:
    """Release the GPUs of the present attempt."""
    if row.gpu_count:
        held = (Allocation.instance_id == row.id) & Allocation.to_at.is_(None)
        held &= Allocation.lost_node_id.is_(None)
        session.execute(update(Allocation).where(held).values(to_at=now()))
    notify(session, Topic.SCHEDULE)


def leave_on_lost_node(session: Session, row: Instance, node_id: str) -> None:
    """Keep the GPUs of the present attempt allocated on its lost node. The project's usage ends now."""
    gpus = of_instances(session, [row.id]).get(row.id, [])
    release(session, row)
    if rows := entries(row.id, row.project_id, row.attempt, gpus):
        session.execute(insert(Allocation), [{**each, "lost_node_id": node_id} for each in rows])


def release_on_lost_node(session: Session, node_id: str, present: Collection[tuple[str, int]] = ()) -> bool:
    """Release what was left on a lost node, except of attempts whose containers are still present there.

    Returns:
        Whether any is still allocated.
    """
    left = Allocation.lost_node_id == node_id, Allocation.to_at.is_(None)
    held = session.execute(select(Allocation.id, Allocation.instance_id, Allocation.attempt).where(*left))
    gone, kept = [], False
    for allocation_id, instance_id, attempt in held:
        if (instance_id, attempt) in present:
            kept = True
        else:
            gone.append(allocation_id)
    if gone:
        session.execute(update(Allocation).where(Allocation.id.in_(gone)).values(to_at=now()))
        notify(session, Topic.SCHEDULE)
    return kept
