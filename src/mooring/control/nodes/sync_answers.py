"""The answer to a node's report: what the node should have."""

from collections.abc import Iterable, Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.instances import gangs, instances, streams
from mooring.control.nodes import assignments
from mooring.control.nodes.reports import is_unknown
from mooring.control.volumes import node_volumes
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Instance, Node
from mooring.schemas.agent import Removal, SyncAnswer, SyncRequest
from mooring_client.schemas.states import DesiredState


def answer(
    session: Session,
    node: Node,
    report: SyncRequest,
    control_plane_id: str,
    interval_s: float,
    self_fence_s: float,
    revision: int | None,
) -> SyncAnswer:
    """What the node should run now, and which reported containers it should remove.

    Args:
        revision: as in `reports.Applied`.

    Use a session of `Database.read`: the states and the GPU allocations then come from one snapshot.
    """
    brief = SyncAnswer(
        control_plane_id=control_plane_id,
        node_id=node.id,
        generation=node.generation,
        report_interval_s=interval_s,
        self_fence_s=self_fence_s,
        renew_credential=node.renewal_due,
        brief=True,
        revision=revision,
    )
    if report.brief and node.generation == report.generation:
        return brief
    desired = _desired(session, node, report)
    return brief.model_copy(update={"brief": False, **desired})


def _desired(session: Session, node: Node, report: SyncRequest) -> dict[str, object]:
    """The fields that only a full answer has."""
    # Instances that hold GPUs here, and ended ones for as long as the node reports their containers.
    rows = {row.id: row for row in _due_rows(session, node)}
    others = {item.instance_id for item in report.instances or ()} - rows.keys()
    if others:
        query = select(Instance).where(Instance.id.in_(others)).options(assignments.without_specs())
        rows |= {row.id: row for row in session.scalars(query)}
    due = [
        row
        for row in rows.values()
        if row.node_id == node.id and row.deleted_at is None and row.desired_state is not DesiredState.DELETED
    ]
    listed = assignments.of(session, node, due, report.specs)
    return {
        "assignments": listed.complete,
        "unchanged": listed.unchanged,
        "removals": _removals(node, rows, report),
        "streams": [] if report.facts.asks_for_streams else streams.waiting(session, node.id),
        "overlays": gangs.overlays_of(session, node),
        "volume_removals": node_volumes.removals(session, node),
    }


def has_news(session: Session, node: Node, report: SyncRequest) -> bool:
    """Whether to answer the node at once: its desired state has changed, or a stream waits for it."""
    return node.generation != report.generation or (
        not report.facts.asks_for_streams and bool(streams.waiting(session, node.id))
    )


def _due_rows(session: Session, node: Node) -> Iterable[Instance]:
    query = select(Instance).options(assignments.without_specs())
    query = query.where(
        Instance.node_id == node.id, Instance.state.in_(HOLDS_GPUS), Instance.deleted_at.is_(None)
    )
    return session.scalars(query)


def _removals(node: Node, rows: Mapping[str, Instance], report: SyncRequest) -> list[Removal]:
    """Reported containers of known instances that the node should remove."""
    removals = []
    for item in report.instances or ():
        row = rows.get(item.instance_id)
        if row is None or is_unknown(item, row.attempt):
            continue
        if item.attempt < row.attempt or row.node_id != node.id or row.desired_state is DesiredState.DELETED:
            # A node must not learn the timeout of an instance that is placed elsewhere (R21).
            timeout_s = row.stop_timeout_s if row.node_id == node.id else instances.DEFAULT_STOP_TIMEOUT_S
            removals.append(Removal(instance_id=row.id, attempt=item.attempt, stop_timeout_s=timeout_s))
    return removals
