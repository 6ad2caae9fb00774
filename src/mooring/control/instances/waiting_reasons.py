"""Sets the reason of pending instances: why the last scheduling cycle did not place them."""

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance
from mooring.scheduler.model import Unplaced
from mooring_client.schemas.states import Reason, State


def set_reasons(session: Session, unplaced: Mapping[str, Unplaced]) -> None:
    """Set the reason of each instance, by id, that is still pending and whose reason has changed.

    One statement for each distinct reason, however many instances have it.
    """
    ids_by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for instance_id, item in unplaced.items():
        ids_by_reason[item.code, item.summary].append(instance_id)
    _lock(session, list(unplaced))
    for (code, message), instance_ids in sorted(ids_by_reason.items()):
        changed = session.scalars(_update(instance_ids, Reason(code=code, message=message))).all()
        notify(session, *map(Topic.instance, changed))


def _lock(session: Session, instance_ids: list[str]) -> None:
    """Lock all rows in the order of their ids: if each update locked its own, two replicas could deadlock."""
    query = select(Instance.id).where(Instance.id.in_(instance_ids), Instance.state == State.PENDING)
    session.execute(query.order_by(Instance.id).with_for_update())


def _update(instance_ids: list[str], reason: Reason) -> ReturningUpdate[str]:
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
