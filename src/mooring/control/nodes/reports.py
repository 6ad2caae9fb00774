"""A node's report, applied: what it says, and what its silence says, about everything placed on it."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from mooring.control import events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.instances import instances, preemption
from mooring.control.nodes import approval, gpus, nodes
from mooring.core.access import Access, Caller, Permission
from mooring.core.errors import StaleSession, Unauthorized
from mooring.core.instance.report import Phase, after_report
from mooring.core.instance.state import HOLDS_GPUS, DesiredState, Reason, State
from mooring.core.text import Text
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, Node
from mooring.db.types import JsonObject, now
from mooring.schemas.agent import ObservedInstance, Orphan, SyncRequest

LOST = Reason(
    code="container_lost", message="the node no longer has its container; it was removed by someone else"
)

# Changes that one transaction takes in, 1 ms of work each: on SQLite all other writers wait for it.
CHANGES_AT_ONCE: Final = 8
# What `_may_be_new` compares.
_COMPARED: Final = (
    Instance.id, Instance.attempt, Instance.state, Instance.desired_state, Instance.node_generation,
    Instance.started_at, Instance.container_id, Instance.image_digest, Instance.exit_code, Instance.endpoints,
    Instance.reason,
)  # fmt: skip


def apply(session: Session, node_id: str, credential_hash: str, report: SyncRequest) -> Sequence[str]:
    """Take a report in, once and in order.

    Returns:
        The ids of changed instances that are left for `apply_rest`, in a transaction of its own.

    Raises:
        Unauthorized: the node was deleted, or the credential is not its own any more.
        StaleSession: a newer agent speaks for this node.
    """
    node = _locked(session, node_id, credential_hash, report)
    if report.session > node.session:
        # Only a database that was restored knows a lower number than an agent was given.
        node.session, node.seq = report.session, 0
    return _heed(session, node, report) if report.seq > node.seq else ()


def apply_rest(
    session: Session, node_id: str, credential_hash: str, report: SyncRequest, left: Sequence[str]
) -> Sequence[str]:
    """Take in what `apply` or this has left of a report, unless a newer one has come since.

    Returns, raises: as `apply`.
    """
    node = _locked(session, node_id, credential_hash, report)
    if (report.session, report.seq) != (node.session, node.seq):
        return ()
    return _take_news(session, node, _placed(session, node, left), report)


def _locked(session: Session, node_id: str, credential_hash: str, report: SyncRequest) -> Node:
    """The node, locked, if the report may speak for it."""
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None:
        raise Unauthorized("this node was deleted; join it again with a new token")
    nodes.recognise(node, credential_hash)
    require_current_session(node, report.session)
    return node


def require_current_session(node: Node, number: int) -> None:
    """Raises StaleSession when a newer agent speaks for the node."""
    if number < node.session:
        raise StaleSession("another agent with this node's identity has started since; this one must stop")


def _heed(session: Session, node: Node, report: SyncRequest) -> Sequence[str]:
    facts = _approve_facts(session, node, report)
    _hear_node(session, node, report, facts)
    gpus.apply_incidents(session, node, report.incidents, report.faults)
    if report.instances is not None:
        placed = _placed(session, node)
        _note_orphans(session, node, {row.id: row.attempt for row in placed}, report)
        return _take_news(session, node, placed, report)
    if report.problem is not None:
        _explain_unknown(session, locks.instances_on(session, node.id), report.problem)
    return ()


def _approve_facts(session: Session, node: Node, report: SyncRequest) -> JsonObject:
    """Take in what the node says of itself, as far as it is approved.

    Returns:
        The node's facts in effect.
    """
    judged = approval.judge_node(node.approved or {}, report)
    approved, changes = judged.approved, judged.changes
    if report.gpus is None:
        changes += [each for each in node.difference or () if each["gpu_uuid"]]
    else:
        known, simulated = approved.get(approval.GPUS), judged.effective["simulated_gpus"]
        inventory = gpus.apply_inventory(session, node, report.gpus, known, simulated=simulated)
        approved = {**approved, approval.GPUS: inventory.approved}
        changes += inventory.changes
    if approved != node.approved:
        node.approved = approved
    if (changes or None) != node.difference:
        _note_claims(session, node, changes)
        node.difference = changes or None
    return judged.effective


def _note_claims(session: Session, node: Node, changes: Sequence[JsonObject]) -> None:
    """Two machines cannot have one GPU: admins hear when a node begins to list another's."""
    before = {each["gpu_uuid"] for each in node.difference or () if each["node_id"]}
    for each in changes:
        if each["node_id"] and each["gpu_uuid"] not in before:
            data = {"gpu_uuid": each["gpu_uuid"], "node_id": each["node_id"], "claimed_by": node.id}
            events.append(session, EventKind.GPU_CLAIMED, data)


def _explain_unknown(session: Session, placed: Sequence[Instance], problem: Reason) -> None:
    """The node cannot tell what it has: nothing changes but what those are told who wait for it."""
    for row in placed:
        waits = row.state in {State.SCHEDULED, State.STARTING, State.UNREACHABLE}
        if waits and row.desired_state is DesiredState.RUNNING and row.reason != problem.model_dump():
            instances.touch(session, row, problem)


def _hear_node(session: Session, node: Node, report: SyncRequest, facts: JsonObject) -> None:
    node.seq = report.seq
    node.heartbeats += 1
    node.last_heartbeat_at = now()
    if report.samples or report.gpus is None:
        own = (node.approved or {}).get(approval.GPUS) or {}
        node.samples = [each.model_dump(mode="json") for each in report.samples if each.uuid in own]
    why = report.problem or approval.problem(node.difference or ())
    problem = why.model_dump() if why else None
    if (node.silent, node.facts, node.problem) != (False, facts, problem):
        changed = (node.silent, node.problem) != (False, problem)
        _audit_overrides(session, node, (node.facts or {}).get("overrides", []), facts["overrides"])
        node.silent, node.facts, node.problem = False, facts, problem
        revisions.changed(session, node.id)
        notify(session, Topic.SCHEDULE)
        if changed:
            nodes.record(session, node)


def _audit_overrides(session: Session, node: Node, before: list[str], after: list[str]) -> None:
    """A safeguard that was turned off on a machine is somebody's deed there (R1)."""
    if before != after:
        itself = Access(Caller(node.id, "node", node.name), Permission.ADMIN, "node.override")
        audit_log.record(
            session, itself, node.id, None, before={"overrides": before}, after={"overrides": after}
        )


def _take_news(
    session: Session, node: Node, placed: Sequence[Row[Any]], report: SyncRequest
) -> Sequence[str]:
    """Take in what is new of the first few of these instances; returns the ids of the others with news."""
    news = _news(node, placed, report)
    ids = sorted(news)
    if first := ids[:CHANGES_AT_ONCE]:
        with session.no_autoflush:  # several may end at once: their rows go out together
            for row in locks.instances_on(session, node.id, first):
                _observe(session, node, row, news[row.id])
    return ids[CHANGES_AT_ONCE:]


def _placed(session: Session, node: Node, ids: Sequence[str] | None = None) -> Sequence[Row[Any]]:
    """What is compared with a report of each instance that the node should have, or of these of them.

    Nearly all are as they were. To read 100 whole rows takes much longer, and on SQLite all writers would
    wait for it.
    """
    query = select(*_COMPARED).where(
        Instance.node_id == node.id, Instance.deleted_at.is_(None), Instance.state.in_(HOLDS_GPUS)
    )
    if ids is not None:
        query = query.where(Instance.id.in_(ids))
    return session.execute(query).all()


def _news(node: Node, placed: Sequence[Row[Any]], report: SyncRequest) -> dict[str, ObservedInstance | None]:
    """What the report says of those placed instances of which it may say something new, by id."""
    host = (node.facts or {}).get("address")
    return {row.id: seen for row, seen in _matched(placed, report) if _may_be_new(row, seen, host)}


def _matched(rows: Sequence[Row[Any]], report: SyncRequest) -> list[tuple[Row[Any], ObservedInstance | None]]:
    """Each placed instance with what was seen of its present attempt; None where silence is an answer.

    A report made before its node had heard of the attempt is silent about it for no reason, and says
    nothing.
    """
    seen = {(item.instance_id, item.attempt): item for item in report.instances or ()}
    return [
        (row, seen.get((row.id, row.attempt)))
        for row in rows
        if (row.id, row.attempt) in seen or report.generation >= row.node_generation
    ]


def _may_be_new(row: Row[Any], seen: ObservedInstance | None, host: str | None) -> bool:
    """Whether `_observe` would change anything, or might."""
    if _state_after(row, seen) is not row.state:
        return True
    if seen is None:
        return False
    return (
        _learned(row, seen) != (row.container_id, row.image_digest, row.exit_code)
        or (seen.phase is Phase.RUNNING and _told_endpoints(seen, host) != row.endpoints)
        or _is_other_reason(row, seen)
    )


def _learned(row: Row[Any] | Instance, seen: ObservedInstance) -> tuple[str | None, str | None, int | None]:
    """The container's id, the image's digest and the exit code, as they are after the report."""
    # The first digest stays for the instance's life: every later attempt runs the same image (R15).
    return seen.container_id or row.container_id, row.image_digest or seen.image_digest, seen.exit_code


def _is_other_reason(row: Row[Any] | Instance, seen: ObservedInstance) -> bool:
    """Whether an instance that goes on starting does so for another reason."""
    said = seen.reason.model_dump() if seen.reason else None
    return row.state is State.STARTING and said is not None and said != row.reason


def _state_after(row: Row[Any] | Instance, seen: ObservedInstance | None) -> State:
    phase, exit_code = (seen.phase, seen.exit_code) if seen else (Phase.ABSENT, None)
    return after_report(row.state, row.desired_state, phase, exit_code, began=row.started_at is not None)


def _observe(session: Session, node: Node, row: Instance, seen: ObservedInstance | None) -> None:
    to = _state_after(row, seen)
    changed = _note(node, row, seen) if seen else False
    if to is not row.state:
        _settle_times(row, seen, to)
        instances.move(session, row, to, _reason(row, seen, to))
        preemption.requeue(session, row, node)
    elif seen and (changed or _is_other_reason(row, seen)):
        instances.touch(session, row, seen.reason)


def _note(node: Node, row: Instance, seen: ObservedInstance) -> bool:
    """Copy what the node knows of the container; whether any of it is new."""
    before = (row.container_id, row.image_digest, row.endpoints, row.exit_code)
    row.container_id, row.image_digest, row.exit_code = _learned(row, seen)
    if seen.phase is Phase.RUNNING:
        row.endpoints = _endpoints(node, row, seen)
    return before != (row.container_id, row.image_digest, row.endpoints, row.exit_code)


def _endpoints(node: Node, row: Instance, seen: ObservedInstance) -> list[JsonObject]:
    """Where the ports that were asked for are reached: always at the node's approved address.

    Users send their data there, so the rest of what a node says about it does not count.
    """
    if not seen.endpoints:
        return []
    told = _told_endpoints(seen, (node.facts or {}).get("address"))
    if told == row.endpoints:
        return row.endpoints  # the usual case, without reading the spec
    asked = {(port.container, port.protocol) for port in instances.spec_of(row).ports}
    return [
        each
        for each in told
        if (each["container"], each["protocol"]) in asked and 1 <= each["port"] <= 65_535
    ]


def _told_endpoints(seen: ObservedInstance, host: str | None) -> list[JsonObject]:
    return [endpoint.model_dump() | {"host": host} for endpoint in seen.endpoints]


def _settle_times(row: Instance, seen: ObservedInstance | None, to: State) -> None:
    """Take the node's own times where they can be true; its clock may be off."""
    if seen is None:
        return
    earliest = row.scheduled_at or row.created_at
    if to is State.RUNNING and row.started_at is None and row.max_duration_s is None:
        row.started_at = _between(earliest, seen.started_at)
    if seen.phase is Phase.EXITED:
        row.started_at = row.started_at or _between(earliest, seen.started_at)
        row.stopped_at = _between(row.started_at or earliest, seen.finished_at)


def _between(earliest: datetime, told: Text | None) -> datetime:
    moment = now()
    try:
        heard = datetime.fromisoformat(told) if told else moment
    except ValueError:
        heard = moment
    return min(max(earliest, heard), moment) if heard.tzinfo else moment


def _reason(row: Instance, seen: ObservedInstance | None, to: State) -> Reason | None:
    """Why it ended: what the user or a limit asked for outweighs how the process took it."""
    if row.desired_state is not DesiredState.RUNNING and row.reason:
        return Reason.model_validate(row.reason)
    if seen is None:
        return LOST if to is State.FAILED else None
    return seen.reason


def is_stranger(item: ObservedInstance, attempt: int | None) -> bool:
    """Whether the attempt was never heard of: it is left alone.

    An attempt above the one on record means that this database is older than the node, a restored
    backup: nothing is killed on the word of a database that has forgotten.

    Args:
        attempt: of the instance on record; None: there is none.
    """
    return attempt is None or item.attempt > attempt


def _note_orphans(session: Session, node: Node, attempts: Mapping[str, int], report: SyncRequest) -> None:
    """Keep what the node holds and nobody here knows, for admins to look at.

    Args:
        attempts: of the instances that are placed on it.
    """
    reported = report.instances or ()
    if others := {each.instance_id for each in reported} - attempts.keys():
        query = select(Instance.id, Instance.attempt).where(Instance.id.in_(others))
        attempts = {**attempts, **{row.id: row.attempt for row in session.execute(query)}}
    strangers = [each for each in reported if is_stranger(each, attempts.get(each.instance_id))]
    listed = [orphan.model_dump() for orphan in (*report.orphans, *map(_orphan, strangers))]
    if listed != node.orphans:
        node.orphans = listed


def _orphan(item: ObservedInstance) -> Orphan:
    return Orphan(
        container_id=item.container_id or "",
        name=f"mooring-{item.instance_id}-{item.attempt}",
        instance_id=item.instance_id,
        control_plane_id=None,
    )
