"""What reservations keep of cards: the scheduler plans around it, and every placement is held to it."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.db.tables import Reservation
from mooring.db.types import now
from mooring.scheduler.model import ReservedPeriod


def by_card(session: Session) -> dict[str, tuple[ReservedPeriod, ...]]:
    """What is reserved and has not ended, the earliest first."""
    query = (
        select(Reservation)
        .where(Reservation.deleted_at.is_(None), Reservation.to_at > now())
        .order_by(Reservation.from_at, Reservation.id)
    )
    found: dict[str, tuple[ReservedPeriod, ...]] = {}
    for row in session.scalars(query):
        hold = ReservedPeriod(row.id, row.project_id, row.from_at.timestamp(), row.to_at.timestamp())
        found.update({uuid: (*found.get(uuid, ()), hold) for uuid in row.gpu_uuids})
    return found
