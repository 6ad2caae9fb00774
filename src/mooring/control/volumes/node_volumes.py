"""What nodes report of their volumes, and which of them they should remove."""

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from mooring.control.volumes import volumes
from mooring.db.tables import Node, NodeVolume, Volume
from mooring.schemas.agent import ReportedVolume, SyncRequest


def apply(session: Session, node: Node, report: SyncRequest) -> None:
    """Apply a report to the volumes of a locked node.

    A node may report only volumes of its own assignments (R21): others are ignored, and never removed.
    """
    if report.volumes is None:
        return
    reported = {each.volume_id: each for each in report.volumes}
    query = select(NodeVolume, Volume).join(Volume, Volume.id == NodeVolume.volume_id)
    for copy, volume in session.execute(query.where(NodeVolume.node_id == node.id)).all():
        if (seen := reported.get(copy.volume_id)) is not None:
            _observe(copy, seen)
        elif report.generation >= copy.node_generation:
            _missing(session, copy, volume)


def _observe(copy: NodeVolume, seen: ReportedVolume) -> None:
    used_mib = copy.used_mib if seen.used_mib is None else seen.used_mib
    if (copy.used_mib, copy.size_enforced) != (used_mib, seen.size_enforced):
        copy.used_mib, copy.size_enforced = used_mib, seen.size_enforced


def _missing(session: Session, copy: NodeVolume, volume: Volume) -> None:
    """The node has not got the volume: it was removed as requested, evicted, or not created yet.

    The row stays until the volume is deleted: the next start, of which no report says anything yet, creates
    the volume again.
    """
    if volume.deleted_at is None:
        if copy.size_enforced is not None:
            copy.used_mib = copy.size_enforced = None
        return
    session.delete(copy)
    session.flush()
    if not volumes.copies(session, [volume.id]):
        volumes.remove(session, volume)


def removals(session: Session, node: Node) -> list[str]:
    """The deleted volumes that the node may still have."""
    query = select(NodeVolume.volume_id).join(Volume, Volume.id == NodeVolume.volume_id)
    query = query.where(NodeVolume.node_id == node.id, Volume.deleted_at.is_not(None))
    return list(session.scalars(query.order_by(NodeVolume.volume_id)))


def local_names(session: Session, node_id: str) -> list[str]:
    """The names of the local volumes on a node, whose files are nowhere else."""
    query = select(Volume.name).where(Volume.node_id == node_id, Volume.deleted_at.is_(None))
    return list(session.scalars(query.order_by(Volume.name)))


def forget_node(session: Session, node_id: str) -> None:
    """The node is removed for good, with what it has. Its local volumes stay, as lost ones.

    Call it before the node is marked as deleted, with the node locked.
    """
    for copy in session.scalars(select(NodeVolume).where(NodeVolume.node_id == node_id)).all():
        session.delete(copy)
    session.flush()
    nowhere = ~exists().where(NodeVolume.volume_id == Volume.id)
    for volume in session.scalars(select(Volume).where(Volume.deleted_at.is_not(None), nowhere)).all():
        volumes.remove(session, volume)
