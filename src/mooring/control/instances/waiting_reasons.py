"""What those that wait are told: why they do, as the scheduler saw it."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from mooring.core.instance.state import Reason, State
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance
from mooring.scheduler.model import Unplaced


def explain_unplaced(session: Session, unplaced: Sequence[Unplaced]) -> None:
    """Tell each waiting instance why it waits; only where the sentence is a new one.

    One statement for each sentence: a thousand that wait for the same thing are told at once.
    """
    waiting: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in unplaced:
        reason = waiting_reason(item)
        waiting[reason.code, reason.message].append(item.instance_id)
    _lock(session, [item.instance_id for item in unplaced])
    for (code, message), instance_ids in sorted(waiting.items()):
        told = session.scalars(_tell(instance_ids, Reason(code=code, message=message))).all()
        notify(session, *map(Topic.instance, told))


def _lock(session: Session, instance_ids: list[str]) -> None:
    """In the order of `locks`: by sentence two replicas would lock the same instances in different orders."""
    query = select(Instance.id).where(Instance.id.in_(instance_ids), Instance.state == State.PENDING)
    session.execute(query.order_by(Instance.id).with_for_update())


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
