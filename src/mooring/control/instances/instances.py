"""Operations on instances, and `move`, which changes the state of one instance.

Users set `desired_state`, nodes report what runs, and `move` applies the resulting transition. `state` has
one other writer: `placements.assign`, which moves many instances from pending to scheduled at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session, object_session

from mooring.control import concurrency, events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.instances import admission, allocations, durations, group_members, placement_rules, specs
from mooring.control.scheduling import quotas, reserved_gpus
from mooring.control.tenants import storage
from mooring.control.volumes import mounts
from mooring.core import ids
from mooring.core.access import Access
from mooring.core.instance.state import ENDED, HOLDS_GPUS, TRANSITIONS
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, Node, Project
from mooring.db.types import new_id, now
from mooring_client.errors import InvalidTransition, NotFound
from mooring_client.schemas.spec import (
    CHANGEABLE_FIELDS,
    InstanceRequest,
    InstanceSpec,
    InstanceTemplate,
)
from mooring_client.schemas.states import DesiredState, Reason, State

DEFAULT_STOP_TIMEOUT_S = 10
QUEUED = Reason(code="queued", message="waiting for the scheduler")
DELETED_BY_USER = Reason(code="deleted_by_user", message="deleted by the user")


def create(session: Session, access: Access, into: Project, request: InstanceRequest) -> Instance:
    """Insert a pending instance into a project that the caller may use (`projects.for_new`).

    Raises:
        NameTaken: a live instance of the project has this name.
        Forbidden, Invalid: as `admission.require`.
        QuotaExceeded: it would exceed a quota of the project.

    Each is raised before anything is written. The caller calls `storage.enforce`.
    """
    # With `fail`, this transaction goes on to place the instance: it takes the placement lock, and must have
    # locked the project before.
    project = quotas.lock(session, into.id, always=request.on_capacity == "fail")
    admission.require(session, project.id, request)
    admission.require_priority(session, access, project.id, request.priority)
    if request.name is not None:
        admission.require_free_names(session, project.id, [request.name])
    quotas.require_within_quota(session, project, request)
    row = new_row(project.id, request, request.name or admission.generated_name(request.image))
    storage.add(session, project.id, stored=storage.size(row.spec, row.labels))
    queue_new(session, [row])
    mounts.attach(session, request, [row])
    audit_log.record(session, access, row.id, project.id, after=_described(row))
    return row


def new_row(project_id: str, request: InstanceTemplate, name: str) -> Instance:
    created_at = now()
    return Instance(
        id=new_id(ids.INSTANCE), project_id=project_id, name=name, labels=request.labels, spec=request.spec(),
        gpu_count=request.gpus.count, gpu_milli=request.gpus.count * request.gpus.milli,
        priority=request.priority, requeue=False, state=State.PENDING, desired_state=DesiredState.RUNNING,
        reason=QUEUED.model_dump(), version=1, generation=1, attempt=0, node_generation=0,
        stop_timeout_s=DEFAULT_STOP_TIMEOUT_S, endpoints=[], simulated=False,
        max_duration_s=request.max_duration_s, created_at=created_at, queued_at=created_at,
    )  # fmt: skip


def queue_new(session: Session, rows: Sequence[Instance]) -> None:
    """Insert pending instances that the caller has admitted."""
    session.add_all(rows)
    for row in rows:
        _append_event(session, row, None)
    notify(session, Topic.QUEUE)


def _described(row: Instance) -> dict[str, Any]:
    """What the audit log records of an instance: not its env and command, which may contain secrets."""
    return {"name": row.name, "image": row.spec["image"], "gpus": row.spec["gpus"]}


def get(session: Session, access: Access, instance_id: str, *, even_deleted: bool = False) -> Instance:
    """Return an instance; with `even_deleted`, also one that is deleted and not purged yet.

    Raises:
        NotFound: it does not exist, is deleted, or belongs to another project.
        Forbidden: the caller may see it, but may not do this.
    """
    row = session.get(Instance, instance_id)
    if row is None or (row.deleted_at is not None and not even_deleted):
        raise NotFound(f"no instance {instance_id}")
    access.require(row.project_id, f"no instance {instance_id}")
    return row


def patch(
    session: Session, access: Access, instance_id: str, changes: Mapping[str, Any], if_match: int | None
) -> Instance:
    """Change name, labels, priority or max_duration_s. A new duration counts from the instance's start."""
    if "max_duration_s" in changes:
        locks.placing(session)  # a reservation made at the same time relies on the instance's present end
    row, _node = locks.instance(session, access, instance_id)
    return change(session, access, row, changes, if_match)


def change(
    session: Session, access: Access, row: Instance, changes: Mapping[str, Any], if_match: int | None
) -> Instance:
    """As `patch`, for a locked instance. If max_duration_s changes, the placement lock was taken before."""
    require_changeable(session, access, row, changes)
    concurrency.require_current_version("instance", row.version, if_match)
    before, stored_before = _values(row, changes), storage.size(row.spec, row.labels)
    if changes.get("name", row.name) != row.name:
        admission.require_free_names(session, row.project_id, [changes["name"]])
        row.name = changes["name"]
    if "labels" in changes:
        row.labels = changes["labels"]
    if "priority" in changes:
        admission.require_priority(session, access, row.project_id, changes["priority"])
        row.priority = changes["priority"]
        notify(session, Topic.SCHEDULE)
    if "max_duration_s" in changes:
        row.max_duration_s = changes["max_duration_s"]
        row.expires_at = _expiry(row)
        reserved_gpus.require_no_overrun(session, row, row.started_at)
    row.spec = {**row.spec, **_values(row, [name for name in CHANGEABLE_FIELDS if name in changes])}
    if row.node_id is not None and row.state in HOLDS_GPUS:
        revisions.changed(session, row.node_id)
    if row.state is State.PENDING:
        changed = Project.pending_changes + 1
        session.execute(update(Project).where(Project.id == row.project_id).values(pending_changes=changed))
    touch(session, row)
    _count_patched(session, row, stored_before, labelled="labels" in changes)
    was, became = audit_log.changes(before, _values(row, changes))
    audit_log.record(session, access, row.id, row.project_id, before=was, after=became)
    return row


def require_changeable(session: Session, access: Access, row: Instance, fields: Collection[str]) -> None:
    """Raises MemberOfGroup: it is a member of a group, and the change is not only one of its labels."""
    if set(fields) != {"labels"}:
        group_members.require_not_in_group(session, "change", access, row)


def _count_patched(session: Session, row: Instance, stored_before: int, *, labelled: bool) -> None:
    written = storage.size(row.labels) if labelled else 0
    stored = storage.size(row.spec, row.labels) - stored_before
    storage.add(session, row.project_id, stored=stored, written=written)


def _values(row: Instance, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def stop(session: Session, access: Access, instance_id: str, timeout_s: int, reason: Reason) -> Instance:
    """Stop the instance and keep its container for the logs. The call may be repeated until it has ended.

    Raises:
        InvalidTransition: it has already ended.
    """
    row, node = locks.instance(session, access, instance_id)
    group_members.require_not_in_group(session, "stop", access, row)
    if row.state in ENDED:
        raise _invalid_transition("stop", row)
    end(session, row, node, DesiredState.STOPPED, timeout_s, reason)
    _audit(session, access, row)
    return row


def end(
    session: Session,
    row: Instance,
    node: Node | None,
    desired: DesiredState,
    stop_timeout_s: int,
    reason: Reason,
) -> None:
    """Stop or delete a locked instance, unless that was requested before."""
    if row.desired_state not in {desired, DesiredState.DELETED}:  # a delete includes the stop
        _set_desired(row, desired, stop_timeout_s)
        _begin_ending(session, row, node, reason)
    elif row.requeue:
        row.requeue = False  # it was preempted and would be queued again; now it ends for good
        touch(session, row)


def _audit(session: Session, access: Access, row: Instance) -> None:
    after = {"name": row.name, "desired_state": str(row.desired_state), "attempt": row.attempt}
    audit_log.record(session, access, row.id, row.project_id, after=after)


def start(session: Session, access: Access, instance_id: str) -> Instance:
    """Queue an ended instance again, for a new placement and a new container.

    Raises:
        InvalidTransition: it has not ended.
        Forbidden, Invalid: as `admission.require`.
        QuotaExceeded: it would exceed a quota of the project.
    """
    project = quotas.lock(session, get(session, access, instance_id).project_id)
    row, node = locks.instance(session, access, instance_id)
    group_members.require_not_in_group(session, "start", access, row)
    if row.state not in ENDED:
        raise _invalid_transition("start", row)
    admission.require(session, row.project_id, spec_of(row))
    admission.require_priority(session, access, row.project_id, row.priority)
    quotas.require_within_quota(session, project, spec_of(row))
    queue_again(session, row, node, QUEUED)
    _audit(session, access, row)
    return row


def queue_again(session: Session, row: Instance, node: Node | None, reason: Reason) -> None:
    """Move a locked instance that has ended back to pending, for a new placement and a new container."""
    _set_desired(row, DesiredState.RUNNING, DEFAULT_STOP_TIMEOUT_S)
    _clear_last_run(row)
    row.node_id, row.queued_at, row.scheduled_at = None, now(), None
    _notify_node(session, node)  # the node still has the old container, and removes it now
    move(session, row, State.PENDING, reason)
    notify(session, Topic.QUEUE)


def restart(session: Session, access: Access, instance_id: str) -> Instance:
    """Start a new attempt on the same node and GPUs. The node removes the old container first.

    Raises:
        InvalidTransition: it is not placed, or it is being stopped.
        Conflict: as `reserved_gpus.require_no_overrun`, `placement_rules.require_admitted`.
        Forbidden, Invalid: as `admission.require`.
    """
    locks.placing(session)  # a reservation made at the same time relies on the instance's present end
    row, node = locks.instance(session, access, instance_id)
    group_members.require_not_in_group(session, "restart", access, row)
    placed = row.state in {State.SCHEDULED, State.STARTING, State.RUNNING}
    if node is None or not placed or row.desired_state is not DesiredState.RUNNING:
        raise _invalid_transition("restart", row)
    admission.require(session, row.project_id, spec_of(row))
    placement_rules.require_admitted(session, node, row.project_id)
    reserved_gpus.require_no_overrun(session, row, None)
    _set_desired(row, DesiredState.RUNNING, DEFAULT_STOP_TIMEOUT_S)
    _clear_last_run(row)
    row.attempt += 1
    row.node_generation = _notify_node(session, node)
    allocations.renew(session, row)
    if row.state is State.SCHEDULED:
        touch(session, row)
    else:
        move(session, row, State.SCHEDULED, Reason(code="restarting", message="restarted by the user"))
    _audit(session, access, row)
    return row


def delete(session: Session, access: Access, instance_id: str, if_match: int | None) -> Instance:
    """Stop the instance and remove its container; reads answer 404 once the node has confirmed that."""
    row, node = locks.instance(session, access, instance_id)
    group_members.require_not_in_group(session, "delete", access, row)
    concurrency.require_current_version("instance", row.version, if_match)
    end(session, row, node, DesiredState.DELETED, implied_stop_timeout_s(row), DELETED_BY_USER)
    _audit(session, access, row)
    return row


def implied_stop_timeout_s(row: Instance) -> int:
    """The timeout of a stop or delete that names none: that of the stop in progress, if any."""
    return row.stop_timeout_s if row.desired_state is DesiredState.STOPPED else DEFAULT_STOP_TIMEOUT_S


def _invalid_transition(operation: str, row: Instance) -> InvalidTransition:
    hint = {
        "stop": "it has already ended",
        "start": "only an ended instance can be started",
        "restart": "only a placed instance that is not being stopped can be restarted; start an ended one",
    }[operation]
    text = f"cannot {operation} an instance that is {row.state}: {hint}"
    return InvalidTransition(text, state=str(row.state))


def _set_desired(row: Instance, desired: DesiredState, stop_timeout_s: int) -> None:
    row.desired_state = desired
    row.stop_timeout_s = stop_timeout_s
    row.requeue = False
    row.generation += 1


def _clear_last_run(row: Instance) -> None:
    row.exit_code = row.container_id = row.started_at = row.stopped_at = row.expires_at = None
    row.endpoints = []


def _begin_ending(session: Session, row: Instance, node: Node | None, reason: Reason) -> None:
    _notify_node(session, node)
    if row.state is State.UNREACHABLE:
        touch(session, row, reason)  # the next report of its node decides the state
    elif row.state in HOLDS_GPUS and row.state is not State.STOPPING:
        move(session, row, State.STOPPING, reason)
    elif row.state not in HOLDS_GPUS:
        # Nothing runs. A node that still has the ended container removes it after its next report.
        deleted = row.desired_state is DesiredState.DELETED
        move(session, row, State.DELETED if deleted else State.STOPPED, reason)
    else:
        touch(session, row)


def _notify_node(session: Session, node: Node | None) -> int:
    """Increment and return the node's generation, so that the waiting call of its agent returns at once."""
    if node is None:
        return 0
    node.generation += 1
    notify(session, Topic.node(node.id))
    return node.generation


def move(session: Session, row: Instance, to: State, reason: Reason | None) -> None:
    """Change the state of an instance, and do all that follows from that.

    Checks the transition against TRANSITIONS, increments the version, appends one event, and releases the
    GPUs when the new state holds none.

    Raises:
        InvalidTransition: the state machine does not allow it: a bug in the caller.
    """
    if to not in TRANSITIONS[row.state]:
        raise InvalidTransition(f"an instance cannot go from {row.state} to {to}", state=str(row.state))
    before = row.state
    row.state = to
    row.version += 1
    row.reason = reason.model_dump() if reason else None
    _stamp(row, to)
    if row.node_id is not None and {before, to} & HOLDS_GPUS:
        revisions.changed(session, row.node_id)
    if before in HOLDS_GPUS and to not in HOLDS_GPUS:
        allocations.release(session, row)
    elif before is State.PENDING and to is not State.SCHEDULED:
        notify(session, Topic.SCHEDULE)  # it no longer counts against its project's quotas
    if row.group_id is not None:
        group_members.moved(session)
    _append_event(session, row, before)


def _stamp(row: Instance, to: State) -> None:
    at = now()
    if to is State.SCHEDULED:
        row.scheduled_at = at
    elif to is State.RUNNING and row.started_at is None:
        row.started_at = at
        row.expires_at = _expiry(row)
    elif to is State.STOPPING:
        stop_by = at.timestamp() + row.stop_timeout_s
        row.placed_as = {**(row.placed_as or {}), "stop_by": stop_by}
    elif to in ENDED:
        row.stopped_at = row.stopped_at or at
        row.expires_at = None
        row.endpoints = []
    elif to is State.DELETED:
        row.deleted_at, row.expires_at = at, None


def _expiry(row: Instance) -> datetime | None:
    if row.started_at is None or row.state in ENDED:
        return None
    return durations.end(row, row.started_at)


def _append_event(session: Session, row: Instance, before: State | None) -> None:
    events.instance_moved(session, row, before, row.state, row.version, row.reason)


def touch(session: Session, row: Instance, reason: Reason | None = None) -> None:
    """Increment the version after a change of anything but the state, and wake the instance's waiters."""
    row.version += 1
    if reason is not None:
        row.reason = reason.model_dump()
    notify(session, Topic.instance(row.id))


def spec_of(row: Instance) -> InstanceSpec:
    """The complete spec of an instance; use `specs_of` for many."""
    session = object_session(row)
    return InstanceSpec.from_row(specs.whole(session, [row])[row.id] if session else row.spec)


def specs_of(session: Session, rows: Sequence[Instance]) -> dict[str, InstanceSpec]:
    """The complete specs of instances by id."""
    return {key: InstanceSpec.from_row(spec) for key, spec in specs.whole(session, rows).items()}
