"""Operations on volumes. Nodes create and remove them: `mounts` and `node_volumes`."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mooring.control import concurrency, events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.instances import placement_rules
from mooring.control.scheduling import quotas
from mooring.control.tenants import projects, row_limits, storage
from mooring.core import ids
from mooring.core.access import Access
from mooring.db.tables import Instance, InstanceVolume, Node, NodeVolume, Project, Volume
from mooring.db.types import JsonObject, new_id, now
from mooring.scheduler.model import Over
from mooring_client.errors import NameTaken, NfsNotAllowed, NotFound, VolumeInUse, VolumeSizeFixed
from mooring_client.schemas.volumes import VolumeFields

_NAMES_SHOWN = 20


def create(session: Session, access: Access, into: Project, name: str, request: VolumeFields) -> Volume:
    """Insert a volume into a project that the caller may use (`projects.for_new`). No node has it yet.

    Raises:
        NameTaken: the project has a volume of this name.
        NfsNotAllowed: only admins create nfs volumes.
        NodeSelectorConflict: its node selector contradicts the project's.
        QuotaExceeded, TooManyRows: the project has too many or too large volumes.
    """
    if request.driver == "nfs" and not access.caller.is_admin:
        raise NfsNotAllowed("only admins create nfs volumes, since nodes reach servers that you may not")
    project = projects.locked(session, access, into.id)
    row_limits.require_room(session, Volume, project.id)
    placement_rules.require_no_conflict(session, project.id, request.node_selector)
    _require_free_name(session, project.id, name)
    _require_within_quota(session, project, request.size or 0)
    row = Volume(
        id=new_id(ids.VOLUME), project_id=project.id, name=name, labels=request.labels, driver=request.driver,
        size_mib=request.size, options=request.options.model_dump(exclude_none=True),
        node_selector=request.node_selector, version=1, created_at=now(),
    )  # fmt: skip
    session.add(row)
    session.flush()
    storage.add(session, project.id, stored=0)
    events.volume_changed(session, row, "created")
    audit_log.record(session, access, row.id, project.id, after=_described(row))
    return row


def _require_free_name(session: Session, project_id: str, name: str) -> None:
    # The unique index decides; this check gives the common case a clear error.
    if find(session, project_id, name) is not None:
        raise NameTaken(f"a volume named {name} exists; choose another name", name=name)


def find(session: Session, project_id: str, name: str) -> Volume | None:
    """The volume of this name that is not being deleted."""
    query = select(Volume).where(Volume.project_id == project_id, Volume.name == name)
    return session.scalar(query.where(Volume.deleted_at.is_(None)))


def _require_within_quota(session: Session, project: Project, more_mib: int) -> None:
    """Raises QuotaExceeded. Volumes count until their nodes have removed them: until then they use disks."""
    limit = project.quotas.get(quotas.VOLUMES)
    if limit is None or more_mib <= 0:
        return
    used = used_mib(session, project.id)
    if used + more_mib > limit:
        raise quotas.exceeded(Over(quotas.VOLUMES, limit, used, more_mib))


def used_mib(session: Session, project_id: str) -> int:
    """The sizes of all volumes of a project together."""
    query = select(func.sum(Volume.size_mib)).where(Volume.project_id == project_id)
    return int(session.scalar(query) or 0)


def _described(row: Volume) -> JsonObject:
    options = {name: value for name, value in row.options.items() if name in {"server", "path"}}
    return {"name": row.name, "driver": row.driver, "size_mib": row.size_mib, **options}


def get(session: Session, access: Access, volume_id: str) -> Volume:
    """A volume, also one that is being deleted. Raises NotFound, Forbidden: as `Access.require`."""
    return _visible(session.get(Volume, volume_id), access, volume_id)


def _visible(row: Volume | None, access: Access, volume_id: str) -> Volume:
    missing = f"no volume {volume_id}"
    if row is None:
        raise NotFound(missing)
    access.require(row.project_id, missing)
    return row


def locked(session: Session, access: Access, volume_id: str) -> Volume:
    """As `get`, with the volume locked, and without those that are being deleted."""
    query = select(Volume).where(Volume.id == volume_id).with_for_update()
    row = session.scalar(query.execution_options(populate_existing=True))
    found = _visible(row, access, volume_id)
    if found.deleted_at is not None:
        raise NotFound(f"volume {volume_id} is being deleted")
    return found


def patch(
    session: Session, access: Access, volume_id: str, changes: Mapping[str, Any], if_match: int | None
) -> Volume:
    """Change labels, or the size while no node has the volume.

    Raises:
        VolumeSizeFixed: a node has the volume, which was created there with its size.
        QuotaExceeded: the new size exceeds the project's quota.
    """
    project = projects.locked(session, access, get(session, access, volume_id).project_id)
    row = locked(session, access, volume_id)
    concurrency.require_current_version("volume", row.version, if_match)
    return change(session, access, project, row, changes)


def change(
    session: Session, access: Access, project: Project, row: Volume, changes: Mapping[str, Any]
) -> Volume:
    """As `patch`, for a locked volume of a locked project."""
    before = {name: getattr(row, name) for name in changes}
    size_mib = changes.get("size_mib", row.size_mib)
    if size_mib != row.size_mib:
        _require_changeable_size(session, row)
        _require_within_quota(session, project, size_mib - (row.size_mib or 0))
    for name, value in changes.items():
        setattr(row, name, value)
    row.version += 1
    storage.add(session, project.id, stored=0)
    events.volume_changed(session, row, "changed")
    was, became = audit_log.changes(before, dict(changes))
    audit_log.record(session, access, row.id, row.project_id, before=was, after=became)
    return row


def _require_changeable_size(session: Session, row: Volume) -> None:
    if row.driver == "nfs":
        raise VolumeSizeFixed("the file server limits the size of an nfs volume")
    if session.scalar(select(NodeVolume.node_id).where(NodeVolume.volume_id == row.id).limit(1)):
        raise VolumeSizeFixed(
            "a node has the volume already, and cannot change its size; create another one and copy the files"
        )


def delete(session: Session, access: Access, volume_id: str, if_match: int | None) -> Volume:
    """Delete a volume with its files. It counts and is shown until its nodes have removed it.

    Raises:
        VolumeInUse: instances that are not deleted mount it.
    """
    row = get(session, access, volume_id)
    if row.deleted_at is not None:  # a repetition
        audit_log.record(session, access, row.id, row.project_id, before=_described(row))
        return row
    # In this order, as `locks` says. Under the placement lock, no node gets the volume meanwhile.
    locks.placing(session)
    node_ids = session.scalars(select(NodeVolume.node_id).where(NodeVolume.volume_id == volume_id)).all()
    nodes = locks.nodes(session, node_ids)
    row = locked(session, access, volume_id)
    concurrency.require_current_version("volume", row.version, if_match)
    _require_unused(session, row)
    row.deleted_at, row.version = now(), row.version + 1
    events.volume_changed(session, row, "deleting")
    audit_log.record(session, access, row.id, row.project_id, before=_described(row))
    _begin_removal(session, row, [node for node in nodes.values() if node.deleted_at is None])
    return row


def _require_unused(session: Session, row: Volume) -> None:
    query = select(Instance.name).join(InstanceVolume, InstanceVolume.instance_id == Instance.id)
    query = query.where(InstanceVolume.volume_id == row.id, Instance.deleted_at.is_(None)).distinct()
    names = session.scalars(query.order_by(Instance.name).limit(_NAMES_SHOWN)).all()
    if names:
        raise VolumeInUse(
            f"{', '.join(names)} mount{'s' if len(names) == 1 else ''} {row.name}; delete "
            f"{'it' if len(names) == 1 else 'them'} first, also if stopped",
            instances=list(names),
        )


def _begin_removal(session: Session, row: Volume, nodes: Sequence[Node]) -> None:
    """Have the nodes remove the volume. Those that were removed themselves have it no longer."""
    for copy in copies(session, [row.id]):
        generations = {node.id: node.generation for node in nodes}
        if copy.node_id in generations:
            copy.node_generation = generations[copy.node_id] + 1
        else:
            session.delete(copy)
    session.flush()
    revisions.notify_nodes(session, [node.id for node in nodes])
    if not nodes:
        remove(session, row)


def remove(session: Session, row: Volume) -> None:
    """Delete the row of a volume that no node has any more."""
    events.volume_changed(session, row, "deleted")
    session.delete(row)


def copies(session: Session, volume_ids: Sequence[str]) -> Sequence[NodeVolume]:
    """Which nodes have these volumes."""
    query = select(NodeVolume).where(NodeVolume.volume_id.in_(volume_ids))
    return session.scalars(query.order_by(NodeVolume.volume_id, NodeVolume.node_id)).all()
