"""Nodes: credentials, cordon and drain, approval of facts, unreachable nodes, delete."""

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from secrets import token_urlsafe
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.control import concurrency, events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.instances import allocations, instances, preemption
from mooring.control.nodes import approval, gpus
from mooring.control.volumes import node_volumes
from mooring.core import credentials
from mooring.core.access import Access, Caller, Permission
from mooring.core.instance.state import ENDED, HOLDS_GPUS
from mooring.core.node import state_of
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, Node, Project
from mooring.db.types import JsonObject, now
from mooring_client.errors import (
    FactsChangedAgain,
    NodeInUse,
    NotFound,
    StaleSession,
    Unauthorized,
    UnknownProject,
)
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.states import DesiredState, Reason, State

UNREACHABLE = Reason(code="node_unreachable", message="its node does not report; the container may still run")
NODE_LOST = Reason(code="node_lost", message="its node was declared dead and removed by an admin")


def state_of_row(node: Node) -> NodeState:
    return state_of(
        silent=node.silent, problem=node.problem is not None, draining=node.draining, cordoned=node.cordoned
    )


def get(session: Session, node_id: str) -> Node:
    """Raises NotFound for a node that does not exist or is deleted."""
    node = session.get(Node, node_id)
    if node is None or node.deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    return node


def _locked(session: Session, node_id: str) -> Node:
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    return node


def new_credential() -> str:
    return f"mn_{token_urlsafe(32)}"


def authenticate(node: Node, credential_hash: str) -> None:
    """Check a credential of the node. The first use of a new credential invalidates the previous one.

    Raises:
        Unauthorized: the credential was replaced.
    """
    require_current_credential(node, credential_hash)
    if credential_hash == node.next_credential_hash:
        node.credential_hash, node.next_credential_hash, node.renewal_due = credential_hash, None, False


def require_current_credential(node: Node | Row[Any], credential_hash: str) -> None:
    """Raises Unauthorized if the credential was replaced."""
    if credential_hash not in {node.credential_hash, node.next_credential_hash}:
        raise Unauthorized("this credential was replaced by a newer one")


def require_current_session(node: Node | Row[Any], number: int) -> None:
    """Raises StaleSession when the node has a newer agent."""
    if number < node.session:
        raise StaleSession("another agent with this node's identity has started since; this one must stop")


def renew_credential(
    session: Session,
    node_id: str,
    credential_hash: str,
    address: str | None = None,
    request_id: str | None = None,
) -> str:
    """Create a new credential for a node that presents its current one; stored as a hash only (R20).

    An earlier new credential that the node has not used yet becomes invalid.
    """
    node = _locked(session, node_id)
    authenticate(node, credential_hash)
    credential = new_credential()
    node.next_credential_hash = credentials.hashed(credential)
    caller = Caller(node.id, "node", node.name)
    access = Access(caller, Permission.ADMIN, "node.renew_credential", address, request_id)
    audit_log.record(session, access, node.id, None)
    return credential


def request_renewal(session: Session, access: Access, node_id: str) -> Node:
    """Make the node fetch a new credential after its next report."""
    node = _locked(session, node_id)
    node.renewal_due = True
    audit_log.record(session, access, node.id, None, after={"name": node.name, "renewal_due": True})
    return node


def open_session(session: Session, node_id: str, credential_hash: str) -> Node:
    """Open a session for a newly started agent. From now on, reports of older agents are rejected."""
    node = _locked(session, node_id)
    authenticate(node, credential_hash)
    node.session += 1
    node.seq = 0
    notify(session, Topic.node(node.id))  # the waiting call of an older agent returns 409
    return node


def patch(
    session: Session, access: Access, node_id: str, changes: Mapping[str, Any], if_match: int | None
) -> Node:
    """Reserve the node for some projects, or open it to all again. Running instances stay.

    Raises:
        UnknownProject: one of the projects does not exist.
        PreconditionFailed, NotFound.
    """
    node = _locked(session, node_id)
    concurrency.require_current_version("node", node.version, if_match)
    before = node.reserved_for
    if "reserved_for" in changes:
        node.reserved_for = _live_projects(session, changes["reserved_for"])
        revisions.changed(session, node.id)
        notify(session, Topic.SCHEDULE)
    node.version += 1
    audit_log.record(
        session, access, node.id, None,
        before={"reserved_for": before}, after={"name": node.name, "reserved_for": node.reserved_for},
    )  # fmt: skip
    return node


def _live_projects(session: Session, project_ids: Collection[str] | None) -> list[str] | None:
    if project_ids is None:
        return None
    wanted = sorted(set(project_ids))
    live = select(Project.id).where(Project.id.in_(wanted), Project.deleted_at.is_(None))
    unknown = set(wanted).difference(session.scalars(live))
    if unknown:
        raise UnknownProject(f"there is no project {min(unknown)}")
    return wanted


def cordon(session: Session, access: Access, node_id: str, *, cordoned: bool) -> Node:
    """Stop or resume placing instances on the node; removing the cordon also ends a drain."""
    node = _locked(session, node_id)
    _mark(session, access, node, cordoned=cordoned, draining=node.draining and cordoned)
    return node


def drain(session: Session, access: Access, node_id: str, deadline_s: int | None) -> Node:
    """Place nothing new, and stop what still runs at the deadline (null: instances run to their own end)."""
    node = _locked(session, node_id)
    node.drain_deadline_at = None if deadline_s is None else now() + timedelta(seconds=deadline_s)
    _mark(session, access, node, cordoned=node.cordoned, draining=True)
    return node


def approve(session: Session, access: Access, node_id: str, difference_id: str | None) -> Node:
    """Approve the facts that differ from the approved ones. Without a difference, no fact changes.

    A GPU that is approved for another node moves to this one.

    Args:
        difference_id: of the difference that the admin has read; null: of the current one.

    Raises:
        Conflict: codes `facts_changed_again`: the difference has changed since; `gpu_in_use`: an instance
            uses a GPU that would move here.
    """
    node, changes = _locked_with_owners(session, node_id)
    if difference_id is not None and difference_id != approval.difference_id(changes):
        raise FactsChangedAgain("the node's difference has changed since you read it; read it again")
    for each in changes:
        if each["node_id"]:
            gpus.move(session, node, each["gpu_uuid"], each["node_id"])
    node.approved = approval.accepted(node.approved or {}, changes)
    node.difference = None
    if changes:
        node.version += 1
    reported = {each["fact"]: each["reported"] for each in changes if each["gpu_uuid"] is None}
    if node.facts:  # the facts of its disk take effect with the next report
        known = {name: value for name, value in reported.items() if name in node.facts}
        node.facts = {**node.facts, **known}
    if node.problem is not None and node.problem["code"] == "facts_changed":
        node.problem = None
        append_state_event(session, node)
    revisions.changed(session, node.id)
    node.generation += 1  # so that the node's waiting call returns: its next report adds the GPUs left out
    notify(session, Topic.SCHEDULE, Topic.node(node.id))
    audit_log.record(session, access, node.id, None, after={"name": node.name, "changes": changes})
    return node


def _locked_with_owners(session: Session, node_id: str) -> tuple[Node, list[JsonObject]]:
    """Lock a node and the owners of the GPUs that it claims; returns the node and its difference."""
    difference = get(session, node_id).difference or []
    locked = locks.nodes(session, {node_id, *(each["node_id"] for each in difference if each["node_id"])})
    node = locked.get(node_id)
    if node is None or node.deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    changes = node.difference or []
    if any(each["node_id"] and each["node_id"] not in locked for each in changes):
        raise FactsChangedAgain("the node's difference has just changed; read it again")
    return node, changes


def approve_next_report(session: Session, access: Access, node_ids: Iterable[str]) -> None:
    """Approve what these nodes report next, as after a join: for the nodes that `mooring up` runs itself."""
    for node in locks.nodes(session, node_ids).values():
        node.local = True
        if node.deleted_at is None and node.approved is not None:
            node.approved = node.difference = None
            audit_log.record(
                session, access, node.id, None, after={"name": node.name, "approved": "next report"}
            )


def _mark(session: Session, access: Access, node: Node, *, cordoned: bool, draining: bool) -> None:
    changed = (node.cordoned, node.draining) != (cordoned, draining)
    audit_log.record(
        session, access, node.id, None,
        before={"cordoned": node.cordoned, "draining": node.draining},
        after={"name": node.name, "cordoned": cordoned, "draining": draining},
    )  # fmt: skip
    node.cordoned, node.draining = cordoned, draining
    if not draining:
        node.drain_deadline_at = None
    node.version += 1
    if changed:
        revisions.changed(session, node.id)
        append_state_event(session, node)
        notify(session, Topic.SCHEDULE)


def append_state_event(session: Session, node: Node) -> None:
    """Append an event with the node's state."""
    events.append(
        session,
        EventKind.NODE_STATE_CHANGED,
        {
            "node_id": node.id,
            "node_name": node.name,
            "state": "deleted" if node.deleted_at else str(state_of_row(node)),
            "reason": node.problem,
        },
    )


def mark_unreachable(session: Session, node_id: str) -> None:
    """Mark a node that has stopped reporting. Its instances become `unreachable` and keep their GPUs."""
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None or node.silent:
        return
    node.silent = True
    revisions.changed(session, node.id)
    append_state_event(session, node)
    for row in locks.instances_on(session, node_id):
        if row.state in HOLDS_GPUS and row.state is not State.UNREACHABLE:
            instances.move(session, row, State.UNREACHABLE, _unreachable_reason(row))


def _unreachable_reason(row: Instance) -> Reason:
    # A requested stop keeps its reason: the instance will end with it.
    if row.desired_state is not DesiredState.RUNNING and row.reason:
        return Reason.model_validate(row.reason)
    return UNREACHABLE


def delete(session: Session, access: Access, node_id: str, *, force: bool) -> None:
    """Delete a node.

    With `force`, an admin declares that the machine is dead: its instances fail and their GPUs are released.
    Nothing else releases GPUs without a report of the node.

    Raises:
        NodeInUse: it has live instances or local volumes, and `force` is not set.
    """
    node = _locked(session, node_id)
    rows = [row for row in locks.instances_on(session, node_id) if row.state not in ENDED]
    if rows and not force:
        raise NodeInUse(
            f"{node.name} has {len(rows)} live instances; drain it first, or, if the machine is dead, "
            "delete it with ?force=true",
            instances=len(rows),
        )
    volumes = node_volumes.local_names(session, node_id)
    if volumes and not force:
        raise NodeInUse(
            f"{node.name} has the only files of {len(volumes)} local volumes, such as {volumes[0]}; delete "
            "them first, or, if they are lost, delete the node with ?force=true",
            volumes=len(volumes),
        )
    for row in rows:
        deleted = row.desired_state is DesiredState.DELETED
        instances.move(session, row, State.DELETED if deleted else State.FAILED, NODE_LOST)
        preemption.requeue(session, row, None)
    allocations.release_on_lost_node(session, node.id)
    node_volumes.forget_node(session, node.id)
    node.deleted_at = now()
    audit_log.record(session, access, node.id, None, before={"name": node.name}, after={"forced": force})
    append_state_event(session, node)
    notify(session, Topic.node(node.id), Topic.GPU_HEALTH)


def count_by_state(session: Session) -> dict[NodeState, int]:
    counts = dict.fromkeys(NodeState, 0)
    for node in session.scalars(select(Node).where(Node.deleted_at.is_(None))):
        counts[state_of_row(node)] += 1
    return counts
