"""Between the rows and the scheduler: the world read into a snapshot, a plan written down under guards."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Row, Text, cast, func, select, tuple_, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from mooring.control import instances, locks, quotas, requests
from mooring.control.nodes import state_of_row
from mooring.core.gpu import Health
from mooring.core.instance import HOLDS_GPUS, DesiredState, Reason, State
from mooring.core.node import NodeState, allocatable_memory_mib
from mooring.db.session import nudge
from mooring.db.tables import Allocation, Gpu, Instance, Node
from mooring.scheduler import quotas as rules
from mooring.scheduler.model import GpuView, NodeView, Placement, Quota, Request, Unplaced

_FEW = 3
NEVER_LOOKED_AT = Instance.reason["code"].as_string() == instances.QUEUED.code


@dataclass(frozen=True, slots=True)
class Used:
    """CPUs and memory that a node's placed instances were given."""

    cpu_milli: int = 0
    memory_mib: int = 0


def node_views(session: Session) -> tuple[NodeView, ...]:
    """Every node as the scheduler sees it, in id order."""
    nodes = session.scalars(select(Node).where(Node.deleted_at.is_(None)).order_by(Node.id)).all()
    used = used_by_node(session)
    gpus = _gpu_views(session)
    return tuple(
        _node_view(node, used.get(node.id, Used()), gpus.get(node.id, ())) for node in nodes if node.facts
    )


def used_by_node(session: Session, node_ids: Iterable[str] | None = None) -> dict[str, Used]:
    query = (
        select(Instance.node_id, func.sum(Instance.cpu_milli), func.sum(Instance.memory_mib))
        .where(Instance.state.in_(HOLDS_GPUS), Instance.node_id.is_not(None), Instance.deleted_at.is_(None))
        .group_by(Instance.node_id)
    )
    if node_ids is not None:
        query = query.where(Instance.node_id.in_(set(node_ids)))
    return {
        node_id: Used(int(cpus or 0), int(memory or 0))
        for node_id, cpus, memory in session.execute(query)
        if node_id
    }


def _gpu_views(session: Session) -> dict[str, tuple[GpuView, ...]]:
    held = set(session.scalars(select(Allocation.gpu_uuid).where(Allocation.to_at.is_(None))))
    grouped: dict[str, list[GpuView]] = defaultdict(list)
    facts_text = cast(Gpu.facts, Text)
    columns = (Gpu.node_id, Gpu.uuid, Gpu.index, Gpu.model, Gpu.memory_mib, Gpu.health, facts_text)
    for node_id, uuid, index, model, memory, health, facts in session.execute(
        select(*columns).order_by(Gpu.uuid)
    ):
        grouped[node_id].append(
            GpuView(
                uuid=uuid,
                index=index,
                model=model,
                memory_mib=memory,
                free=uuid not in held,
                healthy=health is Health.HEALTHY,
                nvlink=(links := _links(facts)).nvlink,
                topology=links.topology,
            )
        )
    return {node_id: tuple(views) for node_id, views in grouped.items()}


@dataclass(frozen=True, slots=True)
class _Links:
    nvlink: Mapping[str, int]
    topology: Mapping[str, str]


@lru_cache(maxsize=100_000)
def _links(facts: str) -> _Links:
    """A GPU's connections, from its facts as stored. They hardly ever change and every look needs them."""
    read = json.loads(facts)
    return _Links({peer["uuid"]: peer["links"] for peer in read["nvlink_peers"]}, read["topology"])


def _node_view(node: Node, used: Used, gpus: Sequence[GpuView]) -> NodeView:
    facts = node.facts or {}
    cpu_milli, memory = facts["cpus"] * 1000, facts["memory_mib"]
    return NodeView(
        id=node.id,
        name=node.name,
        state=state_of_row(node),
        labels=facts.get("labels", {}),
        cpu_milli=cpu_milli,
        memory_mib=memory,
        cpu_milli_free=cpu_milli - used.cpu_milli,
        memory_mib_free=allocatable_memory_mib(memory) - used.memory_mib,
        gpus=tuple(gpus),
    )


def pending(session: Session, *conditions: ColumnElement[bool]) -> tuple[Request, ...]:
    """The queue, oldest first, read as plain columns: it may be long."""
    query = (
        select(Instance.id, Instance.project_id, Instance.queued_at, Instance.spec)
        .where(Instance.state == State.PENDING, *conditions)
        .order_by(Instance.queued_at, Instance.id)
    )
    return tuple(requests.of_columns(*row) for row in session.execute(query))


def assign(session: Session, placements: Sequence[Placement]) -> list[str]:
    """Write down the placements that still hold, each whole or not at all.

    The plan was made from a snapshot and may be wrong by now; the guards here and the unique index on
    live allocations are the authority.

    Returns:
        The ids of the instances that were placed.
    """
    limited = quotas.of_placed(session, (placement.instance_id for placement in placements))
    locks.placing(session)
    nodes = locks.nodes(session, (placement.node_id for placement in placements))
    rows = locks.instances(session, (placement.instance_id for placement in placements))
    guard = _Guard(session, placements, nodes, limited)
    placed = []
    for placement in placements:
        row = rows.get(placement.instance_id)
        if row is not None and _still_pending(row) and guard.takes(placement, row):
            node = nodes[placement.node_id]
            instances.place(session, row, node, placement.cpu_milli, placement.memory_mib)
            instances.allocate(session, row, list(placement.gpu_uuids))
            placed.append(row.id)
    return placed


def _still_pending(row: Instance) -> bool:
    return row.state is State.PENDING and row.desired_state is DesiredState.RUNNING and row.deleted_at is None


class _Guard:
    """What the locked nodes and projects have left, and less with every placement that it lets through."""

    def __init__(
        self,
        session: Session,
        placements: Sequence[Placement],
        nodes: dict[str, Node],
        limited: dict[str, Quota],
    ) -> None:
        self._nodes = nodes
        self._quotas = limited
        uuids = {uuid for placement in placements for uuid in placement.gpu_uuids}
        self._taken = set(
            session.scalars(
                select(Allocation.gpu_uuid).where(Allocation.gpu_uuid.in_(uuids), Allocation.to_at.is_(None))
            )
        )
        usable = select(Gpu.uuid, Gpu.node_id, Gpu.model)
        usable = usable.where(Gpu.uuid.in_(uuids), Gpu.health == Health.HEALTHY)
        self._usable = {uuid: (node_id, model) for uuid, node_id, model in session.execute(usable)}
        self._used = used_by_node(session, nodes)

    def takes(self, placement: Placement, row: Instance) -> bool:
        node = self._nodes.get(placement.node_id)
        if node is None or node.deleted_at is not None or state_of_row(node) is not NodeState.READY:
            return False
        if not all(self._free(uuid, node.id) for uuid in placement.gpu_uuids):
            return False
        if not self._fits(node, placement) or not self._within_quota(placement, row):
            return False
        self._taken.update(placement.gpu_uuids)
        used = self._used.get(node.id, Used())
        self._used[node.id] = Used(
            used.cpu_milli + placement.cpu_milli, used.memory_mib + placement.memory_mib
        )
        return True

    def _free(self, uuid: str, node_id: str) -> bool:
        home, _model = self._usable.get(uuid, (None, ""))
        return uuid not in self._taken and home == node_id

    def _within_quota(self, placement: Placement, row: Instance) -> bool:
        """Whether the project may be given it, which is then counted."""
        quota = self._quotas.get(row.project_id)
        if quota is None:
            return True
        request = replace(requests.of_row(row), quota=quota)
        _home, model = self._usable[placement.gpu_uuids[0]] if placement.gpu_uuids else ("", "")
        given = (model, placement.cpu_milli, placement.memory_mib)
        if rules.over(request, *given):
            return False
        self._quotas[row.project_id] = rules.after(quota, request, *given)
        return True

    def _fits(self, node: Node, placement: Placement) -> bool:
        facts, used = node.facts or {}, self._used.get(node.id, Used())
        cpus = used.cpu_milli + placement.cpu_milli <= facts["cpus"] * 1000
        return cpus and used.memory_mib + placement.memory_mib <= allocatable_memory_mib(facts["memory_mib"])


def explain_unplaced(session: Session, unplaced: Sequence[Unplaced]) -> None:
    """Tell each waiting instance why it waits; only where the sentence is a new one.

    One statement for each sentence: a thousand that wait for the same thing are told at once.
    """
    waiting: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in unplaced:
        reason = waiting_reason(item)
        waiting[reason.code, reason.message].append(item.instance_id)
    for (code, message), instance_ids in sorted(waiting.items()):
        told = session.scalars(_tell(instance_ids, Reason(code=code, message=message))).all()
        nudge(session, *(f"instance:{instance_id}" for instance_id in told))


def _tell(instance_ids: list[str], reason: Reason) -> ReturningUpdate[str]:
    return (
        update(Instance)
        .where(
            Instance.id.in_(instance_ids),
            Instance.state == State.PENDING,
            Instance.reason["message"].as_string() != reason.message,
        )
        .values(reason=reason.model_dump(), version=Instance.version + 1)
        .returning(Instance.id)
        .execution_options(synchronize_session=False)
    )


def waiting_reason(item: Unplaced) -> Reason:
    """`never_placeable` only once there are nodes to judge by."""
    if item.over is not None:
        return Reason(code="quota", message=item.summary)
    if item.ever or not item.refusals:
        return Reason(code="waiting_for_capacity" if item.refusals else "no_nodes", message=item.summary)
    return Reason(code="never_placeable", message=item.summary)


def queue_positions(session: Session, instances_waiting: Sequence[Instance | Row[Any]]) -> dict[str, int]:
    """Place in the queue of those that are pending, from 1, over all projects."""
    if len(instances_waiting) <= _FEW:
        return {row.id: _position(session, row) for row in instances_waiting}
    ranked = (
        select(
            Instance.id,
            func.row_number().over(order_by=(Instance.queued_at, Instance.id)).label("position"),
        )
        .where(Instance.state == State.PENDING)
        .subquery()
    )
    waiting = [row.id for row in instances_waiting]
    query = select(ranked.c.id, ranked.c.position).where(ranked.c.id.in_(waiting))
    return dict(session.execute(query).all())


def _position(session: Session, row: Instance | Row[Any]) -> int:
    """Counting those ahead in the index is cheaper than ranking all, for a few."""
    ahead = tuple_(Instance.queued_at, Instance.id) < (row.queued_at, row.id)
    query = select(func.count()).select_from(Instance).where(Instance.state == State.PENDING, ahead)
    return 1 + (session.scalar(query) or 0)
