"""Operations on instance groups, and the reactions of a group to changes of its members.

A member is an ordinary instance, except that most operations need the whole group (`group_members`).
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, exists, or_, select
from sqlalchemy.orm import Session

from mooring.control import concurrency, events, locks
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.instances import admission, instances, specs
from mooring.control.locks import LockedGroup
from mooring.control.scheduling import quotas
from mooring.control.tenants import storage
from mooring.control.volumes import mounts
from mooring.core import ids
from mooring.core.access import SYSTEM, Access
from mooring.core.group import GROUP_ENDED, group_state, member_name
from mooring.core.instance.state import ENDED
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, InstanceGroup, Project
from mooring.db.types import JsonObject, new_id, now
from mooring_client.errors import (
    HostNetworkNotAllowed,
    InvalidTransition,
    NameTaken,
    NotFound,
)
from mooring_client.schemas.instance_groups import LONGEST_NAME, MAX_RESTARTS, GroupState, InstanceGroupCreate
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import DesiredState, Reason, State

MEMBER_FAILED = "member_failed"


def create(session: Session, access: Access, into: Project, body: InstanceGroupCreate) -> InstanceGroup:
    """Insert a group with all its members, pending, into a project that the caller may use.

    Raises:
        NameTaken: a live group has the name, or a live instance has the name of a member.
        Forbidden, Invalid: as `admission.require`; HostNetworkNotAllowed.
        QuotaExceeded: all members together would exceed a quota of the project.
    """
    project = quotas.lock(session, into.id, always=body.template.on_capacity == "fail")
    _require_network(project, body.network.mode)
    template = body.template.model_copy(update={"labels": {**body.labels, **body.template.labels}})
    admission.require(session, project.id, template)
    admission.require_priority(session, access, project.id, template.priority)
    mounts.require_for_groups(session, project.id, template)
    name = body.name or admission.generated_name(template.image)[-LONGEST_NAME:].lstrip("-")
    _require_free_name(session, project.id, name)
    names = [member_name(name, rank) for rank in range(body.count)]
    admission.require_free_names(session, project.id, names)
    quotas.require_within_quota(session, project, template, body.count)
    row = InstanceGroup(
        id=new_id(ids.INSTANCE_GROUP), project_id=project.id, name=name, labels=body.labels,
        count=body.count, template=template_of(body), on_member_failure=body.on_member_failure,
        network=body.network.mode, encrypted=body.network.encrypted, master_port=body.master_port,
        restarts=0, desired_state=DesiredState.RUNNING, reason=None, version=0, created_at=now(),
    )  # fmt: skip
    session.add(row)
    session.flush()
    members = [instances.new_row(project.id, template, each) for each in names]
    for rank, member in enumerate(members):
        member.group_id, member.group_rank, member.spec = row.id, rank, specs.own_part(member.spec)
    _count_stored(session, row, members)
    instances.queue_new(session, members)
    mounts.attach(session, template, members)
    _changed(session, row)
    audit_log.record(session, access, row.id, project.id, after=_described(row))
    return row


def template_of(body: InstanceGroupCreate) -> JsonObject:
    """The template as stored: the spec of each member, and the labels that only members have."""
    return {**body.template.spec(), "labels": body.template.labels}


def members(session: Session, row: InstanceGroup) -> Sequence[Instance]:
    """The members of a new group, by rank."""
    query = select(Instance).where(Instance.group_id == row.id).order_by(Instance.group_rank)
    return session.scalars(query).all()


def _count_stored(session: Session, row: InstanceGroup, members: Sequence[Instance]) -> None:
    stored = storage.size(row.template, row.labels)
    stored += sum(storage.size(member.spec, member.labels) for member in members)
    storage.add(session, row.project_id, stored=stored, rows=1 + len(members))


def _require_network(project: Project, mode: str) -> None:
    if mode == "host" and not project.host_network:
        raise HostNetworkNotAllowed(
            "this project may not use the network of the hosts; use overlay, or ask an admin to allow it"
        )


def _require_free_name(session: Session, project_id: str, name: str) -> None:
    # The unique index decides; this check gives the common case a clear error.
    query = select(InstanceGroup).where(
        InstanceGroup.project_id == project_id, InstanceGroup.name == name, InstanceGroup.deleted_at.is_(None)
    )
    row = session.scalar(query)
    if row is None:
        return
    if not is_gone(session, row):
        raise NameTaken(f"an instance group named {name} exists; choose another name", name=name)
    row.deleted_at = now()  # the group answers 404 already
    session.flush()


def _described(row: InstanceGroup) -> dict[str, Any]:
    """What the audit log records of a group: not its env and command, as for instances."""
    return {
        "name": row.name,
        "count": row.count,
        "image": row.template["image"],
        "gpus": row.template["gpus"],
    }


def get(session: Session, access: Access, group_id: str) -> InstanceGroup:
    """Return a live group.

    Raises:
        NotFound: it does not exist, is deleted, or belongs to another project.
        Forbidden: the caller may see it, but may not do this.
    """
    row = session.get(InstanceGroup, group_id)
    if row is None or row.deleted_at is not None or is_gone(session, row):
        raise NotFound(f"no instance group {group_id}")
    access.require(row.project_id, f"no instance group {group_id}")
    return row


def is_gone(session: Session, row: InstanceGroup) -> bool:
    """Whether the group is being deleted and has no member left; its row may not be marked as deleted yet."""
    if row.desired_state is not DesiredState.DELETED:
        return False
    return session.scalar(select(Instance.id).where(_live_member_of(row.id)).limit(1)) is None


def _live_member_of(group_id: str) -> Any:
    return (Instance.group_id == group_id) & Instance.deleted_at.is_(None)


def state_of(row: InstanceGroup, members: Sequence[State]) -> GroupState:
    return group_state(members, row.desired_state, failed=_has_failed(row))


def _has_failed(row: InstanceGroup) -> bool:
    return row.reason is not None and row.reason["code"] == MEMBER_FAILED


def stop(session: Session, access: Access, group_id: str, timeout_s: int, reason: Reason) -> InstanceGroup:
    """Stop all members and keep their containers for the logs. The call may be repeated until all have ended.

    Raises:
        InvalidTransition: all members have already ended.
    """
    locked = locks.group(session, access, group_id)
    if (state := _state(locked)) in GROUP_ENDED:
        raise _invalid_transition("stop", state, "it has already ended")
    if locked.group.desired_state is DesiredState.RUNNING:
        _end(session, locked, DesiredState.STOPPED, timeout_s, reason)
    _audit(session, access, locked.group)
    return locked.group


def start(session: Session, access: Access, group_id: str) -> InstanceGroup:
    """Queue all members of an ended group again.

    Raises:
        InvalidTransition: it has not ended.
        Forbidden, Invalid: as `admission.require`; HostNetworkNotAllowed.
        QuotaExceeded: all members together would exceed a quota of the project.
    """
    project = quotas.lock(session, get(session, access, group_id).project_id)
    locked = locks.group(session, access, group_id)
    row, state = locked.group, _state(locked)
    if state not in GROUP_ENDED or row.desired_state is DesiredState.DELETED:
        raise _invalid_transition("start", state, "only a group that has ended can be started")
    _require_network(project, row.network)
    spec = InstanceSpec.from_row(row.template)
    admission.require(session, project.id, spec)
    admission.require_priority(session, access, project.id, spec.priority)
    quotas.require_within_quota(session, project, spec, row.count)
    row.desired_state, row.reason, row.restarts = DesiredState.RUNNING, None, 0
    for member in locked.members:
        instances.queue_again(session, member, locked.nodes.get(member.node_id or ""), instances.QUEUED)
    _changed(session, row)
    _audit(session, access, row)
    return row


def delete(session: Session, access: Access, group_id: str, if_match: int | None) -> InstanceGroup:
    """Stop and remove all members; the group answers 404 once every node has confirmed that."""
    locked = locks.group(session, access, group_id)
    concurrency.require_current_version(
        "instance group", shown_version(locked.group, locked.members), if_match
    )
    if locked.group.desired_state is not DesiredState.DELETED:
        _end(session, locked, DesiredState.DELETED, None, instances.DELETED_BY_USER)
    _delete_if_gone(session, locked)
    _audit(session, access, locked.group)
    return locked.group


def shown_version(row: InstanceGroup, members: Sequence[Instance | Row[Any]]) -> int:
    """The version in the API: it increases with every change of the group or of a member."""
    return row.version + sum(member.version for member in members)


def _state(locked: LockedGroup) -> GroupState:
    return state_of(locked.group, [member.state for member in locked.members])


def _invalid_transition(operation: str, state: GroupState, hint: str) -> InvalidTransition:
    return InvalidTransition(f"cannot {operation} a group that is {state}: {hint}", state=str(state))


def _audit(session: Session, access: Access, row: InstanceGroup) -> None:
    after = {"name": row.name, "desired_state": str(row.desired_state)}
    audit_log.record(session, access, row.id, row.project_id, after=after)


def _end(
    session: Session, locked: LockedGroup, desired: DesiredState, timeout_s: int | None, reason: Reason
) -> None:
    row = locked.group
    row.desired_state, row.reason = desired, reason.model_dump()
    for member in locked.members:
        if member.state is State.DELETED or (desired is DesiredState.STOPPED and member.state in ENDED):
            continue
        node = locked.nodes.get(member.node_id or "")
        stop_timeout_s = instances.implied_stop_timeout_s(member) if timeout_s is None else timeout_s
        instances.end(session, member, node, desired, stop_timeout_s, reason)
    _changed(session, row)


def _changed(session: Session, row: InstanceGroup) -> None:
    row.version += 1
    events.append(
        session,
        EventKind.INSTANCE_GROUP_CHANGED,
        {
            "group_id": row.id,
            "desired_state": str(row.desired_state),
            "restarts": row.restarts,
            "reason": row.reason,
        },
        project_id=row.project_id,
    )
    notify(session, Topic.GROUPS)


def unsettled(session: Session) -> list[str]:
    """The ids of groups that must react to changes of their members (`settle`)."""
    member = Instance.group_id == InstanceGroup.id
    ending = or_(
        Instance.state.in_([State.FAILED, State.STOPPED]),
        # A preempted member with `requeue` is queued again without a reaction of its group.
        (Instance.desired_state != DesiredState.RUNNING) & Instance.requeue.is_(False),
    )
    runs = (InstanceGroup.desired_state == DesiredState.RUNNING) & exists().where(member, ending)
    gone = (InstanceGroup.desired_state == DesiredState.DELETED) & ~exists().where(
        member, Instance.deleted_at.is_(None)
    )
    query = select(InstanceGroup.id).where(InstanceGroup.deleted_at.is_(None), or_(runs, gone))
    return list(session.scalars(query.order_by(InstanceGroup.id)))


def settle(session: Session, group_id: str) -> None:
    """React to failed, ended and deleted members as the group's settings say; safe to repeat."""
    try:
        locked = locks.group(session, SYSTEM, group_id)
    except NotFound:
        return
    if locked.group.desired_state is DesiredState.DELETED:
        _delete_if_gone(session, locked)
    elif locked.group.desired_state is DesiredState.RUNNING:
        _react(session, locked)


def _delete_if_gone(session: Session, locked: LockedGroup) -> None:
    if all(member.state is State.DELETED for member in locked.members):
        locked.group.deleted_at = now()


def _react(session: Session, locked: LockedGroup) -> None:
    failed = [member for member in locked.members if member.state is State.FAILED]
    ending = [
        member
        for member in locked.members
        if member.desired_state is not DesiredState.RUNNING and not member.requeue
    ]
    if failed:
        _after_failure(session, locked, failed)
    elif ending and (reason := ending[0].reason):
        # A deadline has stopped a member: its maximum duration, a drain, or the start timeout.
        _end(session, locked, DesiredState.STOPPED, None, Reason.model_validate(reason))


def _after_failure(session: Session, locked: LockedGroup, failed: Sequence[Instance]) -> None:
    row = locked.group
    may_restart = row.on_member_failure == "restart_member" and row.restarts + len(failed) <= MAX_RESTARTS
    if not may_restart:
        _end(session, locked, DesiredState.STOPPED, None, _failure(failed[0]))
        return
    for member in failed:
        instances.queue_again(session, member, locked.nodes.get(member.node_id or ""), instances.QUEUED)
    row.restarts += len(failed)
    _changed(session, row)


def _failure(member: Instance) -> Reason:
    cause = member.reason["message"] if member.reason else "its process ended"
    return Reason(code=MEMBER_FAILED, message=f"member {member.group_rank} ({member.name}) failed: {cause}")
