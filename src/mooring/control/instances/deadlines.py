"""Deadlines of instances: the maximum duration, the end of a drain, the start timeout."""

from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.instances import instances
from mooring.core.access import SYSTEM
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Instance, Node
from mooring.db.types import now
from mooring_client.errors import InvalidTransition, NotFound
from mooring_client.schemas.states import DesiredState, Reason, State

MAX_DURATION = Reason(code="max_duration_reached", message="it has reached its maximum duration")
DRAINED = Reason(code="node_drained", message="its node was drained and the deadline has passed")
START_TIMEOUT = Reason(
    code="start_timeout", message="it did not start in time; see its events for how far it got"
)


def due(session: Session, start_timeout_s: int) -> list[tuple[str, Reason]]:
    """The ids of instances that are past a deadline, each with the reason to stop it."""
    to_run = select(Instance.id).where(
        Instance.desired_state == DesiredState.RUNNING, Instance.deleted_at.is_(None)
    )
    expired = to_run.where(Instance.expires_at <= now())
    # By the index of nodes: thousands of pending instances need not be read.
    draining = select(Node.id).where(Node.draining.is_(True), Node.drain_deadline_at <= now())
    drained = to_run.where(Instance.node_id.in_(draining), Instance.state.in_(HOLDS_GPUS))
    stuck = to_run.where(
        Instance.node_id.is_not(None),
        Instance.state.in_([State.SCHEDULED, State.STARTING]),
        Instance.started_at.is_(None),
        Instance.scheduled_at < now() - timedelta(seconds=start_timeout_s),
    )
    found = ((expired, MAX_DURATION), (drained, DRAINED), (stuck, START_TIMEOUT))
    return [(instance_id, reason) for query, reason in found for instance_id in session.scalars(query)]


def stop(session: Session, instance_id: str, reason: Reason) -> None:
    """Stop an instance, as its user could, unless it has ended or was deleted meanwhile."""
    try:
        instances.stop(session, SYSTEM, instance_id, instances.DEFAULT_STOP_TIMEOUT_S, reason)
    except (InvalidTransition, NotFound):
        return
