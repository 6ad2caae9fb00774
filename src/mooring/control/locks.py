"""The order in which rows are locked, so that no two transactions wait for each other: projects by id, one
instance group, placing, nodes by id, instances by id, then the end of the event log, then the stored bytes of
projects by id (`db.session.Ending`). SQLite has one writer and needs none of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select, text
from sqlalchemy.orm import Session, defer

from mooring.core.access import Access
from mooring.core.errors import Conflict, NotFound
from mooring.db.session import Ending, at_end
from mooring.db.tables import Instance, InstanceGroup, Node, Project

_TRIES = 5


def end_of_events(session: Session) -> None:
    """Of every transaction that appends to the events; only `Ending.COUNTS` takes a lock after it."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('mooring.events'))"))


def projects(session: Session, project_ids: Iterable[str]) -> dict[str, Project]:
    """Projects, against whose quotas something is to be counted.

    Rows that name a project take a shared lock of its key, whenever they come; this lock lets them.
    """
    query = select(Project).where(Project.id.in_(set(project_ids))).order_by(Project.id)
    query = query.with_for_update(key_share=True)
    found = session.scalars(query.execution_options(populate_existing=True))
    return {row.id: row for row in found}


def project_key(session: Session, project_id: str) -> None:
    """As a row that will name the project locks its key, but now: a delete has then come first, or waits."""
    session.execute(
        select(Project.id).where(Project.id == project_id).with_for_update(read=True, key_share=True)
    )


def live_project(session: Session, project_id: str) -> Project:
    """See to it that what is new in a project does not outlive it.

    The new row's foreign key makes it wait for a delete of the project that came first, and a delete that
    comes later for the new row. What is left is to look again before the commit.

    Raises:
        NotFound: the project was deleted, now or at the end of the transaction.
    """
    row = session.get(Project, project_id)
    if row is None or row.deleted_at is not None:
        raise _no_project(project_id)
    if session.get_bind().dialect.name == "postgresql":
        at_end(session, Ending.WITHOUT_LOCKS, lambda ending: _refuse_deleted(ending, project_id))
    return row


def _refuse_deleted(session: Session, project_id: str) -> None:
    query = select(Project.id).where(Project.id == project_id, Project.deleted_at.is_(None))
    if session.scalar(query) is None:
        raise _no_project(project_id)


def _no_project(project_id: str) -> NotFound:
    return NotFound(f"no project {project_id}")


def placing(session: Session) -> None:
    """Let one transaction at a time give out GPUs, over all replicas."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('mooring.placing'))"))


def linking_audit_log(session: Session) -> bool:
    """Whether this transaction is the only one, over all replicas, that chains rows of the audit log."""
    if session.get_bind().dialect.name != "postgresql":
        return True
    return bool(session.scalar(text("SELECT pg_try_advisory_xact_lock(hashtext('mooring.audit_links'))")))


def signing_on(session: Session) -> None:
    """Let one transaction at a time make the users of first requests, over all replicas."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('mooring.signing_on'))"))


def node(session: Session, node_id: str) -> Node | None:
    return session.scalar(
        select(Node).where(Node.id == node_id).with_for_update().execution_options(populate_existing=True)
    )


def nodes(session: Session, node_ids: Iterable[str]) -> dict[str, Node]:
    query = select(Node).where(Node.id.in_(set(node_ids))).order_by(Node.id).with_for_update()
    found = session.scalars(query.execution_options(populate_existing=True))
    return {row.id: row for row in found}


def instances(session: Session, instance_ids: Iterable[str]) -> dict[str, Instance]:
    query = select(Instance).where(Instance.id.in_(set(instance_ids))).order_by(Instance.id).with_for_update()
    found = session.scalars(query.execution_options(populate_existing=True))
    return {row.id: row for row in found}


def instances_on(
    session: Session, node_id: str, instance_ids: Iterable[str] | None = None
) -> Sequence[Instance]:
    """All live instances of a node that the caller has locked, or these of them."""
    here = [Instance.node_id == node_id, Instance.deleted_at.is_(None)]
    if instance_ids is not None:
        here.append(Instance.id.in_(set(instance_ids)))
    query = (
        select(Instance)
        .where(*here)
        .order_by(Instance.id)
        .options(defer(Instance.spec))  # large, and hardly ever needed here
        .with_for_update()
    )
    return session.scalars(query.execution_options(populate_existing=True)).all()


def instance(session: Session, access: Access, instance_id: str) -> tuple[Instance, Node | None]:
    """An instance and the node it is on, both locked, the node first.

    Raises:
        NotFound: no such instance, or it is deleted or another project's.
        Forbidden: the caller may see it, and not do this with it.
    """
    for _ in range(_TRIES):
        # Placed meanwhile: with the savepoint its lock is let go of, since its node's comes first.
        with suppress(_Moved), session.begin_nested():
            return _with_its_node(session, access, instance_id)
    raise Conflict(f"instance {instance_id} keeps moving between nodes; try again")


class _Moved(Exception):
    """The instance is on another node than the one that was locked for it."""


def _with_its_node(session: Session, access: Access, instance_id: str) -> tuple[Instance, Node | None]:
    node_id = session.scalar(select(Instance.node_id).where(Instance.id == instance_id))
    on = node(session, node_id) if node_id else None
    row = instances(session, [instance_id]).get(instance_id)
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no instance {instance_id}")
    access.require(row.project_id, f"no instance {instance_id}")
    if row.node_id != node_id:
        raise _Moved
    return row, on


@dataclass(frozen=True, slots=True)
class LockedGroup:
    """A group, its members by rank, and the nodes they are on, all locked."""

    group: InstanceGroup
    members: Sequence[Instance]
    nodes: Mapping[str, Node]


def group(session: Session, access: Access, group_id: str) -> LockedGroup:
    """A group with all that a verb on it changes.

    Raises:
        NotFound: no such group, or it is deleted or another project's.
        Forbidden: the caller may see it, and not do this with it.
    """
    query = select(InstanceGroup).where(InstanceGroup.id == group_id).with_for_update(key_share=True)
    row = session.scalar(query.execution_options(populate_existing=True))
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no instance group {group_id}")
    access.require(row.project_id, f"no instance group {group_id}")
    for _ in range(_TRIES):
        with suppress(_Moved), session.begin_nested():
            return _with_its_members(session, row)
    raise Conflict(f"members of instance group {group_id} keep moving between nodes; try again")


def _with_its_members(session: Session, row: InstanceGroup) -> LockedGroup:
    homes = dict(
        session.execute(select(Instance.id, Instance.node_id).where(Instance.group_id == row.id)).all()
    )
    on = nodes(session, filter(None, homes.values()))
    rows = instances(session, homes)
    if any(member.node_id != homes[member.id] for member in rows.values()):
        raise _Moved
    return LockedGroup(row, sorted(rows.values(), key=lambda member: member.group_rank or 0), on)
