"""Applies a node's report: to the node, its GPUs and the instances placed on it, reported or missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.control import events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.instances import durations, instances, preemption
from mooring.control.nodes import approval, gpus, node_loss, nodes
from mooring.control.volumes import node_volumes
from mooring.core.access import Access, Caller, Permission
from mooring.core.instance import run_times
from mooring.core.instance.state import HOLDS_GPUS, Phase, after_report
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, Node
from mooring.db.types import JsonObject, now
from mooring.schemas.agent import ObservedInstance, SyncRequest
from mooring_client.errors import Unauthorized
from mooring_client.schemas.nodes import Orphan
from mooring_client.schemas.states import DesiredState, Reason, State

LOST = Reason(
    code="container_lost", message="the node no longer has its container; it was removed by someone else"
)

# Limit of changed instances per transaction. Each takes 1 ms, and on SQLite all other writers wait for that.
CHANGES_AT_ONCE: Final = 8
# What `_may_change` compares of the placed instances.
_PLACED: Final = select(
    Instance.id, Instance.attempt, Instance.state, Instance.desired_state, Instance.node_generation,
    Instance.started_at, Instance.container_id, Instance.image_digest, Instance.exit_code, Instance.endpoints,
    Instance.reason,
).where(Instance.deleted_at.is_(None), Instance.state.in_(HOLDS_GPUS))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of a transaction that applies a report.

    Attributes:
        left: ids of changed instances that are left for `apply_rest`, in a transaction of its own.
        revision: the node's, with which heartbeats may refer to this report once nothing is left; None: none
            may. A newer report was applied, or one that changes nothing on the node may change something
            here: a GPU that another node has moves to this one when it becomes free.
    """

    left: Sequence[str] = ()
    revision: int | None = None


def apply(session: Session, node_id: str, credential_hash: str, report: SyncRequest) -> Applied:
    """Apply a report, unless this or a newer one was applied before.

    Raises:
        Unauthorized: the node was deleted, or its credential was replaced.
        StaleSession: the node has a newer agent.
    """
    node = _locked(session, node_id, credential_hash, report)
    if report.session > node.session:
        # The stored session is lower than an agent's: the database was restored from a backup.
        node.session, node.seq = report.session, 0
    if report.seq <= node.seq:
        return Applied()
    return _applied(session, node, _apply_new(session, node, report))


def apply_rest(
    session: Session, node_id: str, credential_hash: str, report: SyncRequest, left: Sequence[str]
) -> Applied:
    """Apply more of a report, after `apply` or this function has left some, unless a newer one has arrived.

    Returns, raises: as `apply`.
    """
    node = _locked(session, node_id, credential_hash, report)
    if (report.session, report.seq) != (node.session, node.seq):
        return Applied()
    return _applied(session, node, _apply_changes(session, node, _placed(session, node, left), report))


def _applied(session: Session, node: Node, left: Sequence[str]) -> Applied:
    session.flush()  # the revision is an expression until then
    return Applied(left, node.revision if node.difference is None else None)


def _locked(session: Session, node_id: str, credential_hash: str, report: SyncRequest) -> Node:
    """Lock the node and check that the report comes from its current agent."""
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None:
        raise Unauthorized("this node was deleted; join it again with a new token")
    nodes.authenticate(node, credential_hash)
    nodes.require_current_session(node, report.session)
    return node


def _apply_new(session: Session, node: Node, report: SyncRequest) -> Sequence[str]:
    facts = _approve_facts(session, node, report)
    _apply_node(session, node, report, facts)
    gpus.apply_incidents(session, node, report.incidents, report.faults)
    node_volumes.apply(session, node, report)
    if report.instances is not None:
        placed = _placed(session, node)
        _store_orphans(session, node, {row.id: row.attempt for row in placed}, report)
        node_loss.confirm_gone(session, node, report)
        return _apply_changes(session, node, placed, report)
    if report.problem is not None:
        _set_problem_reasons(session, locks.instances_on(session, node.id), report.problem)
    return ()


def _approve_facts(session: Session, node: Node, report: SyncRequest) -> JsonObject:
    """Update the node's approved facts, its difference from them, and its GPUs.

    Returns:
        The facts that take effect.
    """
    compared = approval.compare_node(node.approved or {}, report)
    approved, changes = compared.approved, compared.changes
    if report.gpus is None:
        changes += [each for each in node.difference or () if each["gpu_uuid"]]
    else:
        known, simulated = approved.get(approval.GPUS), compared.effective["simulated_gpus"]
        inventory = gpus.apply_inventory(session, node, report.gpus, known, simulated=simulated)
        approved = {**approved, approval.GPUS: inventory.approved}
        changes += inventory.changes
    if approved != node.approved:
        node.approved = approved
    if (changes or None) != node.difference:
        _append_claims(session, node, changes)
        node.difference = changes or None
    return compared.effective


def _append_claims(session: Session, node: Node, changes: Sequence[JsonObject]) -> None:
    """Append an event for each GPU of another node that this node newly lists."""
    before = {each["gpu_uuid"] for each in node.difference or () if each["node_id"]}
    for each in changes:
        if each["node_id"] and each["gpu_uuid"] not in before:
            data = {"gpu_uuid": each["gpu_uuid"], "node_id": each["node_id"], "claimed_by": node.id}
            events.append(session, EventKind.GPU_CLAIMED, data)


def _set_problem_reasons(session: Session, placed: Sequence[Instance], problem: Reason) -> None:
    """The node cannot list its containers: states stay, and starting instances get the problem as reason."""
    for row in placed:
        waits = row.state in {State.SCHEDULED, State.STARTING, State.UNREACHABLE}
        if waits and row.desired_state is DesiredState.RUNNING and row.reason != problem.model_dump():
            instances.touch(session, row, problem)


def _apply_node(session: Session, node: Node, report: SyncRequest, facts: JsonObject) -> None:
    node.seq = report.seq
    node.heartbeats += 1
    node.last_heartbeat_at = now()
    if report.samples or report.gpus is None:  # else the samples of the last report stay
        own = (node.approved or {}).get(approval.GPUS) or {}
        node.samples = [each.model_dump(mode="json") for each in report.samples if each.uuid in own]
    reason = report.problem or approval.problem(node.difference or ())
    problem = reason.model_dump() if reason else None
    if (node.silent, node.facts, node.problem) != (False, facts, problem):
        changed = (node.silent, node.problem) != (False, problem)
        _audit_overrides(session, node, (node.facts or {}).get("overrides", []), facts["overrides"])
        node.silent, node.facts, node.problem = False, facts, problem
        revisions.changed(session, node.id)
        notify(session, Topic.SCHEDULE)
        if changed:
            nodes.append_state_event(session, node)


def _audit_overrides(session: Session, node: Node, before: list[str], after: list[str]) -> None:
    """Audit that a safeguard was turned off, or on again, on the machine (R1)."""
    if before != after:
        access = Access(Caller(node.id, "node", node.name), Permission.ADMIN, "node.override")
        audit_log.record(
            session, access, node.id, None, before={"overrides": before}, after={"overrides": after}
        )


def _apply_changes(
    session: Session, node: Node, placed: Sequence[Row[Any]], report: SyncRequest
) -> Sequence[str]:
    """Apply the report to the first few changed instances; returns the ids of the other changed ones."""
    changed = _changed(node, placed, report)
    ids = sorted(changed)
    if first := ids[:CHANGES_AT_ONCE]:
        with session.no_autoflush:  # write all rows in one flush
            for row in locks.instances_on(session, node.id, first):
                _observe(session, node, row, changed[row.id])
    return ids[CHANGES_AT_ONCE:]


def _placed(session: Session, node: Node, ids: Sequence[str] | None = None) -> Sequence[Row[Any]]:
    """The compared columns of the instances placed on the node: of all, or of those with these ids.

    Nearly all are unchanged. Reading 100 complete rows takes much longer, and on SQLite all writers would
    wait for it.
    """
    query = _PLACED.where(Instance.node_id == node.id)
    if ids is not None:
        query = query.where(Instance.id.in_(ids))
    return session.execute(query).all()


def _changed(
    node: Node, placed: Sequence[Row[Any]], report: SyncRequest
) -> dict[str, ObservedInstance | None]:
    """The placed instances that the report may change, by id, each with what was observed."""
    host = (node.facts or {}).get("address")
    return {row.id: seen for row, seen in _matched(placed, report) if _may_change(row, seen, host)}


def _matched(rows: Sequence[Row[Any]], report: SyncRequest) -> list[tuple[Row[Any], ObservedInstance | None]]:
    """Placed instances, each with what was observed of its current attempt; None: the container is missing.

    Left out are attempts that are missing because the report is older than their placement, or because an
    earlier attempt's container is still there: after a restart it uses the same GPUs, and must be gone first.
    """
    seen = {(item.instance_id, item.attempt): item for item in report.instances or ()}
    present: dict[str, int] = {}  # the lowest attempt with a container, by instance
    for item in report.instances or ():
        if item.phase is not Phase.REFUSED:
            present[item.instance_id] = min(item.attempt, present.get(item.instance_id, item.attempt))
    return [
        (row, seen.get((row.id, row.attempt)))
        for row in rows
        if (row.id, row.attempt) in seen
        or (report.generation >= row.node_generation and present.get(row.id, row.attempt) >= row.attempt)
    ]


def _may_change(row: Row[Any], seen: ObservedInstance | None, host: str | None) -> bool:
    """Whether `_observe` might change anything."""
    if _state_after(row, seen) is not row.state:
        return True
    if seen is None:
        return False
    return (
        _container_facts(row, seen) != (row.container_id, row.image_digest, row.exit_code)
        or (seen.phase is Phase.RUNNING and _reported_endpoints(seen, host) != row.endpoints)
        or _is_other_reason(row, seen)
    )


def _container_facts(
    row: Row[Any] | Instance, seen: ObservedInstance
) -> tuple[str | None, str | None, int | None]:
    """The container's id, the image's digest and the exit code after the report."""
    # The first digest is final: every later attempt runs the same image (R15).
    return seen.container_id or row.container_id, row.image_digest or seen.image_digest, seen.exit_code


def _is_other_reason(row: Row[Any] | Instance, seen: ObservedInstance) -> bool:
    """Whether the report gives a new reason for an instance that is still starting."""
    reported = seen.reason.model_dump() if seen.reason else None
    return row.state is State.STARTING and reported is not None and reported != row.reason


def _state_after(row: Row[Any] | Instance, seen: ObservedInstance | None) -> State:
    phase, exit_code = (seen.phase, seen.exit_code) if seen else (Phase.ABSENT, None)
    return after_report(row.state, row.desired_state, phase, exit_code, began=row.started_at is not None)


def _observe(session: Session, node: Node, row: Instance, seen: ObservedInstance | None) -> None:
    to = _state_after(row, seen)
    changed = _copy_facts(node, row, seen) if seen else False
    if to is not row.state:
        _set_times(row, seen, to)
        instances.move(session, row, to, _reason(row, seen, to))
        preemption.requeue(session, row, node)
        node_loss.requeue(session, row, node, seen.reason if seen else None)
    elif seen and (changed or _is_other_reason(row, seen)):
        instances.touch(session, row, seen.reason)


def _copy_facts(node: Node, row: Instance, seen: ObservedInstance) -> bool:
    """Copy what the node reports of the container; returns whether any of it has changed."""
    before = (row.container_id, row.image_digest, row.endpoints, row.exit_code)
    row.container_id, row.image_digest, row.exit_code = _container_facts(row, seen)
    if seen.phase is Phase.RUNNING:
        row.endpoints = _endpoints(node, row, seen)
    return before != (row.container_id, row.image_digest, row.endpoints, row.exit_code)


def _endpoints(node: Node, row: Instance, seen: ObservedInstance) -> list[JsonObject]:
    """The endpoints of the ports in the spec, always at the node's approved address.

    Users send their data there, so other hosts and ports that a node reports are ignored.
    """
    if not seen.endpoints:
        return []
    reported = _reported_endpoints(seen, (node.facts or {}).get("address"))
    if reported == row.endpoints:
        return row.endpoints  # the usual case, without reading the spec
    ports = {
        (port.container, port.protocol) for port in instances.spec_of(row).ports if port.expose == "node"
    }
    return [
        each
        for each in reported
        if (each["container"], each["protocol"]) in ports and 1 <= each["port"] <= 65_535
    ]


def _reported_endpoints(seen: ObservedInstance, host: str | None) -> list[JsonObject]:
    return [endpoint.model_dump() | {"host": host} for endpoint in seen.endpoints]


def _set_times(row: Instance, seen: ObservedInstance | None, to: State) -> None:
    # The maximum duration of a running instance counts from this report, not from the node's time (`move`).
    if seen is None:
        return
    earliest, latest = row.scheduled_at or row.created_at, now()
    if to is State.RUNNING and row.started_at is None and durations.end(row, earliest) is None:
        row.started_at = run_times.started(earliest, latest, seen.started_at)
    if seen.phase is Phase.EXITED:
        row.started_at = row.started_at or run_times.started(earliest, latest, seen.started_at)
        row.stopped_at = run_times.stopped(row.started_at, latest, seen.started_at, seen.finished_at)


def _reason(row: Instance, seen: ObservedInstance | None, to: State) -> Reason | None:
    """The reason of the new state. That of a requested stop takes precedence over what the node reports."""
    if row.desired_state is not DesiredState.RUNNING and row.reason:
        return Reason.model_validate(row.reason)
    if seen is None:
        return LOST if to is State.FAILED else None
    return seen.reason


def is_unknown(item: ObservedInstance, attempt: int | None) -> bool:
    """Whether the database does not know the reported attempt. Such a container is never removed.

    An attempt above the stored one means that the database was restored from a backup older than the
    container: missing rows are then no reason to kill anything.

    Args:
        attempt: the stored attempt of the instance; None: no such instance.
    """
    return attempt is None or item.attempt > attempt


def _store_orphans(session: Session, node: Node, attempts: Mapping[str, int], report: SyncRequest) -> None:
    """Store which containers of the node are unknown here, for admins.

    Args:
        attempts: of the instances placed on the node, by id.
    """
    reported = report.instances or ()
    if others := {each.instance_id for each in reported} - attempts.keys():
        query = select(Instance.id, Instance.attempt).where(Instance.id.in_(others))
        attempts = {**attempts, **{row.id: row.attempt for row in session.execute(query)}}
    unknown = [each for each in reported if is_unknown(each, attempts.get(each.instance_id))]
    by_agent = {orphan.container_id for orphan in report.orphans}
    others_here = [_orphan(each) for each in unknown if (each.container_id or "") not in by_agent]
    listed = [orphan.model_dump() for orphan in (*report.orphans, *others_here)]
    if listed != node.orphans:
        node.orphans = listed
        revisions.changed(session, node.id)
        notify(session, Topic.SCHEDULE)


def _orphan(item: ObservedInstance) -> Orphan:
    return Orphan(
        container_id=item.container_id or "",
        name=f"mooring-{item.instance_id}-{item.attempt}",
        instance_id=item.instance_id,
        control_plane_id=None,
    )
