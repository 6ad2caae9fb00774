"""Nodes: joining, speaking, being told to take no more, and going."""

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from secrets import token_urlsafe
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import concurrency, events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.instances import instances, preemption
from mooring.control.nodes import approval, gpus
from mooring.core import credentials, ids
from mooring.core.access import Access, Caller, Permission
from mooring.core.errors import Conflict, Invalid, NodeInUse, NotFound, Unauthorized
from mooring.core.instance.state import ENDED, HOLDS_GPUS, DesiredState, Reason, State
from mooring.core.node import NodeState, state_of
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, JoinToken, Node, Project
from mooring.db.types import JsonObject, new_id, now

UNREACHABLE = Reason(code="node_unreachable", message="its node is silent; the container may well be running")
NODE_LOST = Reason(code="node_lost", message="its node was declared dead and removed by an admin")


def state_of_row(node: Node) -> NodeState:
    return state_of(
        silent=node.silent, problem=node.problem is not None, draining=node.draining, cordoned=node.cordoned
    )


def get(session: Session, node_id: str) -> Node:
    """Raises NotFound for a node that never was or is deleted."""
    node = session.get(Node, node_id)
    if node is None or node.deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    return node


def _locked(session: Session, node_id: str) -> Node:
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    return node


def create_join_token(
    session: Session, access: Access, ttl_s: int, node_name: str | None
) -> tuple[JoinToken, str]:
    """A single-use token and its secret, which is kept as a hash only (R20)."""
    secret = f"mj_{token_urlsafe(32)}"
    token = JoinToken(
        id=new_id(ids.JOIN_TOKEN),
        secret_hash=credentials.hashed(secret),
        node_name=node_name,
        created_at=now(),
        expires_at=now() + timedelta(seconds=ttl_s),
    )
    session.add(token)
    after = {"node_name": node_name, "expires_at": token.expires_at.isoformat()}
    audit_log.record(session, access, token.id, None, after=after)
    return token, secret


def join(
    session: Session,
    secret: str,
    asked_name: str | None,
    address: str | None = None,
    request_id: str | None = None,
) -> tuple[Node, str]:
    """Redeem a join token for a node with a credential of its own.

    A name whose node exists already is refused: a token must not take over another machine's identity.

    Raises:
        Unauthorized: the token is unknown, used or expired; which of them is not told.
        Conflict: code `node_name_taken`.
    """
    token = session.scalar(
        select(JoinToken).where(JoinToken.secret_hash == credentials.hashed(secret)).with_for_update()
    )
    if token is None or token.used_at is not None or token.expires_at <= now():
        raise Unauthorized("the join token is unknown, used or expired; ask an admin for a new one")
    name = token.node_name or asked_name
    if name is None:
        raise Conflict(
            "give the node a name: MOORING_NODE_NAME, or node_name in the token", code="node_name_missing"
        )
    if session.scalar(select(Node.id).where(Node.name == name, Node.deleted_at.is_(None))):
        raise Conflict(
            f"a node named {name} exists; delete it first, or set another MOORING_NODE_NAME",
            code="node_name_taken",
        )
    node, credential = _new_node(name)
    session.add(node)
    token.used_at, token.node_id = now(), node.id
    joined = Access(Caller(token.id, "join_token", name), Permission.ADMIN, "node.join", address, request_id)
    audit_log.record(session, joined, node.id, None, after={"name": name})
    return node, credential


def _new_credential() -> str:
    return f"mn_{token_urlsafe(32)}"


def _new_node(name: str) -> tuple[Node, str]:
    credential = _new_credential()
    node = Node(
        id=new_id(ids.NODE), name=name, credential_hash=credentials.hashed(credential), cordoned=False,
        draining=False, version=1, silent=True, samples=[], orphans=[], session=0, seq=0, generation=0,
        heartbeats=0, created_at=now(),
    )  # fmt: skip
    return node, credential


def recognise(node: Node, credential_hash: str) -> None:
    """Take a credential for what it is now; the first use of a new one ends the one before.

    Raises:
        Unauthorized: it was the node's, and is no more.
    """
    require_current_credential(node, credential_hash)
    if credential_hash == node.next_credential_hash:
        node.credential_hash, node.next_credential_hash, node.renewal_due = credential_hash, None, False


def require_current_credential(node: Node, credential_hash: str) -> None:
    """Raises Unauthorized when a credential was the node's, and is no more."""
    if credential_hash not in {node.credential_hash, node.next_credential_hash}:
        raise Unauthorized("this credential was replaced by a newer one")


def renew_credential(
    session: Session,
    node_id: str,
    credential_hash: str,
    address: str | None = None,
    request_id: str | None = None,
) -> str:
    """A new credential for a node that shows its present one; kept as a hash only (R20).

    One that was fetched before and never used is forgotten.
    """
    node = _locked(session, node_id)
    recognise(node, credential_hash)
    credential = _new_credential()
    node.next_credential_hash = credentials.hashed(credential)
    caller = Caller(node.id, "node", node.name)
    itself = Access(caller, Permission.ADMIN, "node.renew_credential", address, request_id)
    audit_log.record(session, itself, node.id, None)
    return credential


def ask_to_renew(session: Session, access: Access, node_id: str) -> Node:
    """Have the node fetch a new credential with its next report."""
    node = _locked(session, node_id)
    node.renewal_due = True
    audit_log.record(session, access, node.id, None, after={"name": node.name, "renewal_due": True})
    return node


def open_session(session: Session, node_id: str, credential_hash: str) -> Node:
    """Let a newly started agent speak for the node, and no older one."""
    node = _locked(session, node_id)
    recognise(node, credential_hash)
    node.session += 1
    node.seq = 0
    notify(session, Topic.node(node.id))  # an older agent's waiting call ends, and hears 409
    return node


def patch(
    session: Session, access: Access, node_id: str, changes: Mapping[str, Any], if_match: int | None
) -> Node:
    """Reserve the node for some projects, or open it to all again. Nothing that runs there is touched.

    Raises:
        Invalid: code `unknown_project`: one of the projects does not exist.
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
        raise Invalid(f"there is no project {min(unknown)}", code="unknown_project")
    return wanted


def cordon(session: Session, access: Access, node_id: str, *, cordoned: bool) -> Node:
    """Place nothing new (or do again); taking the cordon off ends a drain too."""
    node = _locked(session, node_id)
    _mark(session, access, node, cordoned=cordoned, draining=node.draining and cordoned)
    return node


def drain(session: Session, access: Access, node_id: str, deadline_s: int | None) -> Node:
    """Place nothing new; what is left at the deadline is stopped (no deadline: it runs out by itself)."""
    node = _locked(session, node_id)
    node.drain_deadline_at = None if deadline_s is None else now() + timedelta(seconds=deadline_s)
    _mark(session, access, node, cordoned=node.cordoned, draining=True)
    return node


def approve(session: Session, access: Access, node_id: str, difference_id: str | None) -> Node:
    """Accept what the node reports differently from what was approved; without a difference, nothing happens.

    A GPU that another node has approved moves to this one.

    Args:
        difference_id: of the difference that the admin has read; null: whatever it is now.

    Raises:
        Conflict: code `facts_changed_again`: the node reports something else by now; `gpu_in_use`: an
            instance holds a GPU that would move here.
    """
    node, changes = _locked_with_owners(session, node_id)
    if difference_id is not None and difference_id != approval.difference_id(changes):
        raise Conflict(
            "the node reports something else than you have read; read it again", code="facts_changed_again"
        )
    for each in changes:
        if each["node_id"]:
            gpus.move(session, node, each["gpu_uuid"], each["node_id"])
    node.approved = approval.accepted(node.approved or {}, changes)
    node.difference = None
    if changes:
        node.version += 1
    told = {each["fact"]: each["reported"] for each in changes if each["gpu_uuid"] is None}
    if node.facts:  # those of its disk come with the next report
        node.facts = {**node.facts, **{name: told[name] for name in told if name in node.facts}}
    if node.problem is not None and node.problem["code"] == "facts_changed":
        node.problem = None
        record(session, node)
    revisions.changed(session, node.id)
    node.generation += 1  # its waiting call ends, and its next report brings the GPUs that were left out
    notify(session, Topic.SCHEDULE, Topic.node(node.id))
    audit_log.record(session, access, node.id, None, after={"name": node.name, "changes": changes})
    return node


def _locked_with_owners(session: Session, node_id: str) -> tuple[Node, list[JsonObject]]:
    """A node and its difference, locked with the nodes whose GPUs it lists, in the order of ids."""
    claims = get(session, node_id).difference or []
    locked = locks.nodes(session, {node_id, *(each["node_id"] for each in claims if each["node_id"])})
    node = locked.get(node_id)
    if node is None or node.deleted_at is not None:
        raise NotFound(f"no node {node_id}")
    changes = node.difference or []
    if any(each["node_id"] and each["node_id"] not in locked for each in changes):
        raise Conflict("the node reports something else by now; read it again", code="facts_changed_again")
    return node, changes


def approve_anew(session: Session, access: Access, node_ids: Iterable[str]) -> None:
    """Approve what these nodes report next, as after a join: for the operator's own nodes (`mooring up`)."""
    for node in locks.nodes(session, node_ids).values():
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
        record(session, node)
        notify(session, Topic.SCHEDULE)


def record(session: Session, node: Node) -> None:
    """Append the node's state as an event."""
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


def silence(session: Session, node_id: str) -> None:
    """Note that the node has not spoken for too long; what it holds is unknown, and stays held."""
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None or node.silent:
        return
    node.silent = True
    revisions.changed(session, node.id)
    record(session, node)
    for row in locks.instances_on(session, node_id):
        if row.state in HOLDS_GPUS and row.state is not State.UNREACHABLE:
            instances.move(session, row, State.UNREACHABLE, _while_silent(row))


def _while_silent(row: Instance) -> Reason:
    # A stop that was asked for keeps its reason: it is what the instance will end with.
    if row.desired_state is not DesiredState.RUNNING and row.reason:
        return Reason.model_validate(row.reason)
    return UNREACHABLE


def delete(session: Session, access: Access, node_id: str, *, force: bool) -> None:
    """Forget a node.

    With `force` an admin vouches that the machine is dead: what it held has failed and its GPUs are let
    go, which is the one way to let go of them without the node's own word.

    Raises:
        NodeInUse: instances live there, and `force` is not set.
    """
    node = _locked(session, node_id)
    rows = [row for row in locks.instances_on(session, node_id) if row.state not in ENDED]
    if rows and not force:
        raise NodeInUse(
            f"{len(rows)} instances live on {node.name}; drain it first, or, if the machine is dead, "
            "delete it with ?force=true",
            instances=len(rows),
        )
    for row in rows:
        gone = row.desired_state is DesiredState.DELETED
        instances.move(session, row, State.DELETED if gone else State.FAILED, NODE_LOST)
        preemption.requeue(session, row, None)
    node.deleted_at = now()
    audit_log.record(session, access, node.id, None, before={"name": node.name}, after={"forced": force})
    record(session, node)
    notify(session, Topic.node(node.id), Topic.GPU_HEALTH)


def count_by_state(session: Session) -> dict[NodeState, int]:
    counts = dict.fromkeys(NodeState, 0)
    for node in session.scalars(select(Node).where(Node.deleted_at.is_(None))):
        counts[state_of_row(node)] += 1
    return counts
