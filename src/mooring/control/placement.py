"""Between the rows and the scheduler: what waits read as requests, a plan written down under guards."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, func, select, tuple_, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from mooring.control import instances, requests
from mooring.core.instance import Reason, State
from mooring.db.session import nudge
from mooring.db.tables import Instance
from mooring.scheduler.model import Request, Unplaced

_FEW = 3
NEVER_LOOKED_AT = Instance.reason["code"].as_string() == instances.QUEUED.code


def pending(session: Session, *conditions: ColumnElement[bool]) -> tuple[Request, ...]:
    """The queue, oldest first, read as plain columns: it may be long."""
    query = (
        select(Instance.id, Instance.project_id, Instance.queued_at, Instance.spec)
        .where(Instance.state == State.PENDING, *conditions)
        .order_by(Instance.queued_at, Instance.id)
    )
    return tuple(
        requests.of_columns(key, project_id, queued_at.timestamp(), spec)
        for key, project_id, queued_at, spec in session.execute(query)
    )


def explain_unplaced(session: Session, unplaced: Sequence[Unplaced]) -> None:
    """Tell each waiting instance why it waits; only where the sentence is a new one.

    One statement for each sentence: a thousand that wait for the same thing are told at once.
    """
    waiting: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in unplaced:
        reason = waiting_reason(item)
        waiting[reason.code, reason.message].append(item.instance_id)
    for (code, message), instance_ids in sorted(waiting.items()):
        told = session.scalars(_tell(instance_ids, Reason(code=code, message=message))).all()
        nudge(session, *(f"instance:{instance_id}" for instance_id in told))


def _tell(instance_ids: list[str], reason: Reason) -> ReturningUpdate[str]:
    return (
        update(Instance)
        .where(
            Instance.id.in_(instance_ids),
            Instance.state == State.PENDING,
            Instance.reason["message"].as_string() != reason.message,
        )
        .values(reason=reason.model_dump(), version=Instance.version + 1)
        .returning(Instance.id)
        .execution_options(synchronize_session=False)
    )


def waiting_reason(item: Unplaced) -> Reason:
    return Reason(code=item.code, message=item.summary)


def queue_positions(session: Session, instances_waiting: Sequence[Instance | Row[Any]]) -> dict[str, int]:
    """Place in the queue of those that are pending, from 1, over all projects."""
    if len(instances_waiting) <= _FEW:
        return {row.id: _position(session, row) for row in instances_waiting}
    ranked = (
        select(
            Instance.id,
            func.row_number().over(order_by=(Instance.queued_at, Instance.id)).label("position"),
        )
        .where(Instance.state == State.PENDING)
        .subquery()
    )
    waiting = [row.id for row in instances_waiting]
    query = select(ranked.c.id, ranked.c.position).where(ranked.c.id.in_(waiting))
    return dict(session.execute(query).all())


def _position(session: Session, row: Instance | Row[Any]) -> int:
    """Counting those ahead in the index is cheaper than ranking all, for a few."""
    ahead = tuple_(Instance.queued_at, Instance.id) < (row.queued_at, row.id)
    query = select(func.count()).select_from(Instance).where(Instance.state == State.PENDING, ahead)
    return 1 + (session.scalar(query) or 0)
