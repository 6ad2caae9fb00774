"""What reservations ask of the instances that run on their GPUs before they begin: to keep to their ends."""

from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.core.errors import Conflict
from mooring.core.instance import HOLDS_GPUS
from mooring.db.tables import Allocation, Instance, Reservation
from mooring.db.types import now
from mooring.schemas.base import timestamp


def refuse_overrun(session: Session, row: Instance, began: datetime | None) -> None:
    """Let an instance have the longest duration that it now has, if it ends before others' reservations.

    Args:
        began: from when its duration counts; null: from now.

    Raises:
        Conflict: code `gpu_reserved`: another project will have its GPUs before that.
    """
    if row.state not in HOLDS_GPUS:
        return
    held = set(
        session.scalars(
            select(Allocation.gpu_uuid).where(Allocation.instance_id == row.id, Allocation.to_at.is_(None))
        )
    )
    query = select(Reservation).where(
        Reservation.deleted_at.is_(None), Reservation.to_at > now(), Reservation.project_id != row.project_id
    )
    if row.max_duration_s is not None:
        ends_at = (began or now()) + timedelta(seconds=row.max_duration_s)
        query = query.where(Reservation.from_at < ends_at)
    for reservation in session.scalars(query.order_by(Reservation.from_at)) if held else ():
        if held & set(reservation.gpu_uuids):
            begins = timestamp(reservation.from_at)
            raise Conflict(
                f"its GPUs are reserved for another project from {begins} on; it may run until then",
                code="gpu_reserved",
                reserved_from=begins,
            )
