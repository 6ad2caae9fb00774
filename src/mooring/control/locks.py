"""The order in which rows are locked, so that transactions cannot deadlock: projects by id, one instance
group, the placement lock, nodes by id, instances by id, then the stored bytes of projects by id
(`db.session.Ending`). SQLite has one writer at a time and needs none of these locks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import ColumnElement, select, text
from sqlalchemy.orm import Session, defer

from mooring.core.access import Access
from mooring.db.session import Ending, at_end
from mooring.db.tables import Instance, InstanceGroup, Node, Project, WebhookProgress
from mooring_client.errors import Conflict, NotFound

_TRIES = 5
_LIVE = "mooring.live_projects"
_LOCKED = "mooring.locked_instances"


def projects(session: Session, project_ids: Iterable[str]) -> dict[str, Project]:
    """Lock projects whose quotas are to be checked.

    The insert of a row that refers to a project takes a shared lock of the project's key. This lock does not
    block such inserts.
    """
    query = select(Project).where(Project.id.in_(set(project_ids))).order_by(Project.id)
    query = query.with_for_update(key_share=True)
    found = session.scalars(query.execution_options(populate_existing=True))
    return {row.id: row for row in found}


def project_key(session: Session, project_id: str) -> None:
    """Lock the project's key, so that a delete of the project waits for the rows that are to refer to it."""
    session.execute(
        select(Project.id).where(Project.id == project_id).with_for_update(read=True, key_share=True)
    )


def live_project(session: Session, project_id: str) -> Project:
    """Ensure that a new row in a project cannot be committed after the project was deleted.

    Because of its foreign key, the insert of the row waits for an earlier delete of the project, and a later
    delete waits for the insert. So it is enough to read the project again before the commit.

    Raises:
        NotFound: the project was deleted. Raised here, or at the end of the transaction.
    """
    row = session.get(Project, project_id)
    if row is None or row.deleted_at is not None:
        raise _no_project(project_id)
    if _LIVE not in session.info:
        session.info[_LIVE] = {}
        at_end(session, Ending.WITHOUT_LOCKS, _require_live)
    # The reference keeps the row in the session, which would read it again for the next request of a batch.
    session.info[_LIVE][project_id] = row
    return row


def _require_live(session: Session) -> None:
    wanted: dict[str, Project] = session.info.pop(_LIVE)
    if session.get_bind().dialect.name == "postgresql":
        query = select(Project.id).where(Project.id.in_(wanted), Project.deleted_at.is_(None))
        for project_id in wanted.keys() - set(session.scalars(query)):
            raise _no_project(project_id)


def _no_project(project_id: str) -> NotFound:
    return NotFound(f"no project {project_id}")


def placing(session: Session) -> None:
    """The placement lock: one transaction at a time allocates GPUs, over all replicas."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('mooring.placing'))"))


def linking_audit_log(session: Session) -> bool:
    """Try to take the lock for linking rows of the audit log; returns false while another replica has it."""
    if session.get_bind().dialect.name != "postgresql":
        return True
    return bool(session.scalar(text("SELECT pg_try_advisory_xact_lock(hashtext('mooring.audit_links'))")))


def signing_on(session: Session) -> None:
    """One transaction at a time creates or updates users at their sign-on, over all replicas."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('mooring.signing_on'))"))


def webhooks(session: Session) -> int:
    """One transaction at a time changes webhooks and their deliveries. After the lock of a project, if any.

    Returns:
        Up to which `seq` of events deliveries exist.
    """
    return session.scalars(select(WebhookProgress.seq).with_for_update()).one()


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
    """Lock the live instances of a node that the caller has locked: all, or those of `instance_ids`."""
    conditions = [Instance.node_id == node_id, Instance.deleted_at.is_(None)]
    if instance_ids is not None:
        conditions.append(Instance.id.in_(set(instance_ids)))
    query = (
        select(Instance)
        .where(*conditions)
        .order_by(Instance.id)
        .options(defer(Instance.spec))  # large, and rarely needed here
        .with_for_update()
    )
    return session.scalars(query.execution_options(populate_existing=True)).all()


class _Moved(Exception):
    """The node of the instance has changed since it was read, so another node is locked."""


def for_operations(session: Session, instance_ids: Iterable[str]) -> None:
    """Lock all instances that several operations will lock with `instance`, and their nodes.

    `instance` then locks nothing more: if each operation locked a node, two transactions could deadlock.

    Raises:
        Conflict: instances were placed again and again while this tried to lock them.
    """
    ids = set(instance_ids)
    for _ in range(_TRIES):
        with suppress(_Moved), session.begin_nested():
            rows, locked_nodes = _locked_with_nodes(session, Instance.id.in_(ids))
            found = {row.id: (row, locked_nodes.get(row.node_id or "")) for row in rows}
            session.info[_LOCKED] = {each: found.get(each) for each in ids}
            return
    raise Conflict("the instances keep moving between nodes; try again")


def instance(session: Session, access: Access, instance_id: str) -> tuple[Instance, Node | None]:
    """Lock the node that an instance is on, then the instance.

    Raises:
        NotFound: the instance does not exist, is deleted, or belongs to another project.
        Forbidden: the caller may see it, but may not do this.
        Conflict: it was placed again and again while this tried to lock it.
    """
    locked: dict[str, tuple[Instance, Node | None] | None] = session.info.get(_LOCKED, {})
    if instance_id in locked:
        return _visible(access, instance_id, locked[instance_id])
    for _ in range(_TRIES):
        # After a move, the rollback to the savepoint unlocks the instance: the new node must be locked first.
        with suppress(_Moved), session.begin_nested():
            return _locked_with_node(session, access, instance_id)
    raise Conflict(f"instance {instance_id} keeps moving between nodes; try again")


def _locked_with_node(session: Session, access: Access, instance_id: str) -> tuple[Instance, Node | None]:
    node_id = session.scalar(select(Instance.node_id).where(Instance.id == instance_id))
    locked_node = node(session, node_id) if node_id else None
    row = instances(session, [instance_id]).get(instance_id)
    found = _visible(access, instance_id, None if row is None else (row, locked_node))
    if found[0].node_id != node_id:
        raise _Moved
    return found


def _visible(
    access: Access, instance_id: str, found: tuple[Instance, Node | None] | None
) -> tuple[Instance, Node | None]:
    if found is None or found[0].deleted_at is not None:
        raise NotFound(f"no instance {instance_id}")
    access.require(found[0].project_id, f"no instance {instance_id}")
    return found


@dataclass(frozen=True, slots=True)
class LockedGroup:
    """A group, its members by rank, and their nodes, all locked."""

    group: InstanceGroup
    members: Sequence[Instance]
    nodes: Mapping[str, Node]


def group(session: Session, access: Access, group_id: str) -> LockedGroup:
    """Lock a group, the nodes of its members, and the members.

    Raises:
        NotFound: the group does not exist, is deleted, or belongs to another project.
        Forbidden: the caller may see it, but may not do this.
        Conflict: members were placed again and again while this tried to lock them.
    """
    query = select(InstanceGroup).where(InstanceGroup.id == group_id).with_for_update(key_share=True)
    row = session.scalar(query.execution_options(populate_existing=True))
    if row is None or row.deleted_at is not None:
        raise NotFound(f"no instance group {group_id}")
    access.require(row.project_id, f"no instance group {group_id}")
    for _ in range(_TRIES):
        with suppress(_Moved), session.begin_nested():
            members, locked_nodes = _locked_with_nodes(session, Instance.group_id == row.id)
            by_rank = sorted(members, key=lambda member: member.group_rank or 0)
            return LockedGroup(row, by_rank, locked_nodes)
    raise Conflict(f"members of instance group {group_id} keep moving between nodes; try again")


def _locked_with_nodes(
    session: Session, which: ColumnElement[bool]
) -> tuple[Collection[Instance], Mapping[str, Node]]:
    """Lock the nodes of instances, then the instances. Raises _Moved if one of them has moved meanwhile."""
    node_ids = dict(session.execute(select(Instance.id, Instance.node_id).where(which)).all())
    locked_nodes = nodes(session, filter(None, node_ids.values()))
    rows = instances(session, node_ids).values()
    if any(row.node_id != node_ids[row.id] for row in rows):
        raise _Moved
    return rows, locked_nodes
