"""What reservations ask of the instances that run on their GPUs before they begin: to keep to their ends."""

from datetime import datetime
from math import inf

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.scheduling import reserved_gpus
from mooring.core.errors import Conflict
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Allocation, Instance
from mooring.db.types import now
from mooring.schemas.base import timestamp_of


def require_no_overrun(session: Session, row: Instance, began: datetime | None) -> None:
    """Let an instance have the longest duration that it now has, if it ends before others' reservations.

    Args:
        began: from when its duration counts; null: from now.

    Raises:
        Conflict: code `gpu_reserved`: another project will have its GPUs before that.
    """
    if row.state not in HOLDS_GPUS:
        return
    ends_at = inf if row.max_duration_s is None else (began or now()).timestamp() + row.max_duration_s
    held = select(Allocation.gpu_uuid).where(Allocation.instance_id == row.id, Allocation.to_at.is_(None))
    reserved = reserved_gpus.by_card(session)
    others = (
        hold.from_at
        for uuid in session.scalars(held)
        for hold in reserved.get(uuid, ())
        if hold.project_id != row.project_id and hold.from_at < ends_at
    )
    if (first := min(others, default=None)) is not None:
        begins = timestamp_of(first)
        raise Conflict(
            f"its GPUs are reserved for another project from {begins} on; it may run until then",
            code="gpu_reserved",
            reserved_from=begins,
        )
