"""Which GPUs are reserved and when. The scheduler plans around them; placements are checked against them."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.instances import durations
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Allocation, Instance, Reservation
from mooring.db.types import now
from mooring.scheduler.model import ReservedPeriod
from mooring_client.errors import GpuReserved
from mooring_client.schemas.base import timestamp_of


def by_gpu(session: Session) -> dict[str, tuple[ReservedPeriod, ...]]:
    """The reserved periods of each GPU that have not ended, earliest first."""
    query = (
        select(Reservation)
        .where(Reservation.deleted_at.is_(None), Reservation.to_at > now())
        .order_by(Reservation.from_at, Reservation.id)
    )
    found: dict[str, tuple[ReservedPeriod, ...]] = {}
    for row in session.scalars(query):
        period = ReservedPeriod(row.id, row.project_id, row.from_at.timestamp(), row.to_at.timestamp())
        found.update({uuid: (*found.get(uuid, ()), period) for uuid in row.gpu_uuids})
    return found


def require_no_overrun(session: Session, row: Instance, began: datetime | None) -> None:
    """Check that an instance ends, by its maximum duration, before others' reservations of its GPUs begin.

    Args:
        began: the start, from which its maximum duration counts; None: now.

    Raises:
        GpuReserved: another project has reserved one of its GPUs from a time before it ends.
    """
    if row.state not in HOLDS_GPUS:
        return
    ends_at = durations.end_s(row, began or now())
    gpus = select(Allocation.gpu_uuid).where(Allocation.instance_id == row.id, Allocation.to_at.is_(None))
    reserved = by_gpu(session)
    others = (
        period.from_at
        for uuid in session.scalars(gpus)
        for period in reserved.get(uuid, ())
        if period.project_id != row.project_id and period.from_at < ends_at
    )
    if (first := min(others, default=None)) is not None:
        begins = timestamp_of(first)
        raise GpuReserved(
            f"its GPUs are reserved for another project from {begins} on; it may run until then",
            reserved_from=begins,
        )
