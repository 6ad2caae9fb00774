"""Instances with `on_node_loss: replace` continue on another node when theirs is lost.

    unreachable --lost_after--> failed (node_lost) -> pending (replaced) -> scheduled on another node

The old attempt may still run on the lost node. Its GPUs stay allocated there, to `lost_node_id`, until the
node has reported that its container is gone, or an admin deletes the node. Three things end the old attempt:
the node itself, which stops it after a time without contact; the fence command of the operator; and the
control plane's answer when the node returns.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, exists, func, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from mooring.control import events, locks, revisions
from mooring.control.events import EventKind
from mooring.control.instances import allocations, instances
from mooring.db.tables import ControlPlane, Instance, Node
from mooring.schemas.agent import SyncRequest
from mooring_client.schemas.states import DesiredState, Reason, State

# The reason code of an attempt that its node has stopped because it had no contact.
SELF_FENCED: Final = "self_fenced"
_REPLACED: Final = "replaced_after_node_loss"


@dataclass(frozen=True, slots=True)
class SilentNode:
    """A silent node with instances to replace.

    Attributes:
        heartbeats: its count when this was read.
        fences_itself: whether its agent stops replaceable instances without contact; earlier releases do not.
    """

    id: str
    name: str
    address: str | None
    heartbeats: int
    fences_itself: bool


def silent_nodes(session: Session) -> list[SilentNode]:
    """The silent nodes with instances to replace, in id order."""
    query = select(Node).where(Node.silent, Node.deleted_at.is_(None), exists().where(*_to_replace(Node.id)))
    return [
        SilentNode(
            id=node.id,
            name=node.name,
            address=(node.facts or {}).get("address"),
            heartbeats=node.heartbeats,
            fences_itself=bool((node.facts or {}).get("fences_itself")),
        )
        for node in session.scalars(query.order_by(Node.id))
    ]


def _to_replace(node_id: str | InstrumentedAttribute[str]) -> tuple[ColumnElement[bool], ...]:
    return (
        Instance.node_id == node_id,
        Instance.state == State.UNREACHABLE,
        Instance.desired_state == DesiredState.RUNNING,
        Instance.deleted_at.is_(None),
        Instance.group_id.is_(None),
        Instance.replaced_on_loss.is_(True),
    )


def replace(session: Session, lost: SilentNode, *, fenced: bool) -> None:
    """Queue the instances of a lost node again, for another attempt on another node.

    Args:
        fenced: whether the fence command has confirmed that nothing runs on the node any more. Only then are
            the GPUs of its attempts released now.
    """
    if _is_paused(session):
        return
    node = locks.node(session, lost.id)
    if node is None or node.deleted_at is not None or not node.silent or node.heartbeats != lost.heartbeats:
        return  # it has returned
    ids = session.scalars(select(Instance.id).where(*_to_replace(node.id))).all()
    replaced = []
    for row in locks.instances_on(session, node.id, ids):
        if not fenced:
            allocations.leave_on_lost_node(session, row, node.id)
        instances.move(session, row, State.FAILED, Reason(code="node_lost", message=f"{node.name} is lost"))
        _queue_again(session, row, node, f"its node {node.name} was lost; it waits for another node")
        replaced.append(row.id)
    if not replaced:
        return
    node.has_lost_attempts = node.has_lost_attempts or not fenced
    revisions.changed(session, node.id)
    data = {"node_id": node.id, "node_name": node.name, "instances": replaced, "fenced": fenced}
    events.append(session, EventKind.NODE_LOST, data)


def requeue(session: Session, row: Instance, node: Node, reason: Reason | None) -> None:
    """Queue an instance again that its node has stopped because it had no contact with the control plane."""
    if reason is None or reason.code != SELF_FENCED or row.desired_state is not DesiredState.RUNNING:
        return
    if row.state in {State.FAILED, State.SUCCEEDED} and row.replaced_on_loss and row.group_id is None:
        _queue_again(session, row, node, f"{node.name} had no contact and stopped it; it is placed again")


def _queue_again(session: Session, row: Instance, node: Node, message: str) -> None:
    queued_at = row.queued_at
    instances.queue_again(session, row, node, Reason(code=_REPLACED, message=message))
    row.queued_at = queued_at  # its old place in the queue


def confirm_gone(session: Session, node: Node, report: SyncRequest) -> None:
    """Release the GPUs of lost attempts that are no longer on their node, which has returned."""
    if not node.has_lost_attempts or report.instances is None:
        return
    present = {(each.instance_id, each.attempt) for each in report.instances}
    node.has_lost_attempts = allocations.release_on_lost_node(session, node.id, present)
    revisions.changed(session, node.id)


def pause(session: Session, silent: Collection[str]) -> bool:
    """Replace nothing until `resume`: too many nodes went silent at once. Returns whether this is new."""
    if not _set_paused(session, paused=True):
        return False
    data = {"silent": len(silent), "nodes": _count(session, silent=None)}
    events.append(session, EventKind.REPLACEMENT_PAUSED, data)
    return True


def resume(session: Session) -> bool:
    """End a pause if fewer than half of the nodes are silent. Returns whether it has ended."""
    silent, nodes = _count(session, silent=True), _count(session, silent=None)
    if silent >= max(2, (nodes + 1) // 2) or not _set_paused(session, paused=False):
        return False
    events.append(session, EventKind.REPLACEMENT_RESUMED, {"silent": silent, "nodes": nodes})
    return True


def is_paused(session: Session) -> bool:
    return bool(session.scalar(select(ControlPlane.replacement_paused)))


def _is_paused(session: Session) -> bool:
    """As `is_paused`, and no other transaction changes it before this one has ended."""
    return bool(session.scalar(select(ControlPlane.replacement_paused).with_for_update(read=True)))


def _set_paused(session: Session, *, paused: bool) -> bool:
    """Returns whether this has changed it."""
    changed = update(ControlPlane).where(ControlPlane.replacement_paused.is_not(paused))
    rows = session.execute(changed.values(replacement_paused=paused).returning(ControlPlane.id)).all()
    return bool(rows)


def _count(session: Session, *, silent: bool | None) -> int:
    query = select(func.count()).select_from(Node).where(Node.deleted_at.is_(None))
    if silent is not None:
        query = query.where(Node.silent.is_(silent))
    return session.scalar(query) or 0
