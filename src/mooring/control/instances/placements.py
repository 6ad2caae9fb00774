"""Writes the placements of a scheduling plan: pending -> scheduled for many instances in a few statements.

Besides `instances.move`, this is the only writer of `Instance.state`. It does the same for each instance: a
new version, an event, its GPU allocations and a notification of its node.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Row, Table, bindparam, insert, select, text, update
from sqlalchemy.orm import Session

from mooring.control import events, locks, revisions
from mooring.control.instances import allocations, durations, group_members
from mooring.control.instances.capacity import Guard
from mooring.control.scheduling import quotas
from mooring.db.tables import Allocation, Instance, Node
from mooring.db.types import now
from mooring.scheduler.model import GpuAllocation, Placement
from mooring_client.schemas.spec import WHOLE_MILLI
from mooring_client.schemas.states import DesiredState, State

Rows = Mapping[str, Row[Any]]
Unit = Sequence[tuple[Placement, Row[Any]]]


def assign(session: Session, placements: Sequence[Placement]) -> list[str]:
    """Write the placements that are still valid. The members of a group are placed together or not at all.

    The plan was made from a snapshot and may be outdated; `Guard` and the triggers on `allocations` decide.

    Returns:
        The ids of the instances that were placed.
    """
    limited = quotas.lock_for_instances(session, (placement.instance_id for placement in placements))
    locks.placing(session)
    nodes = _locked_nodes(session, {placement.node_id for placement in placements})
    rows = _locked_instances(session, {placement.instance_id for placement in placements})
    guard = Guard(session, placements, nodes, limited)
    placed = [pair for unit in _units(placements, rows) if guard.takes(unit) for pair in unit]
    if placed:
        _write(session, placed, nodes)
        generations = {node_id: node.generation + 1 for node_id, node in nodes.items()}
        guard.volumes.bind([placement for placement, _row in placed], generations)
    return [row.id for _placement, row in placed]


def _locked_nodes(session: Session, node_ids: Iterable[str]) -> dict[str, Any]:
    columns = (
        Node.id, Node.deleted_at, Node.silent, Node.problem, Node.draining, Node.cordoned, Node.facts,
        Node.generation, Node.reserved_for,
    )  # fmt: skip
    query = select(*columns).where(Node.id.in_(node_ids)).order_by(Node.id).with_for_update()
    return {row.id: row for row in session.execute(query)}


def _locked_instances(session: Session, instance_ids: Iterable[str]) -> dict[str, Any]:
    row = Instance
    columns = (
        row.id, row.project_id, row.group_id, row.state, row.desired_state, row.deleted_at, row.version,
        row.attempt, row.gpu_count, durations.COLUMN,
    )  # fmt: skip
    query = select(*columns).where(row.id.in_(instance_ids)).order_by(row.id).with_for_update()
    return {each.id: each for each in session.execute(query)}


def _units(placements: Sequence[Placement], rows: Rows) -> list[Unit]:
    """Placements of instances that are still pending: a unit for each instance or group.

    Left out are groups with a member that is no longer pending, and further placements of an instance.
    """
    first: dict[str, Placement] = {}
    for placement in placements:
        first.setdefault(placement.instance_id, placement)
    units: dict[str, list[tuple[Placement, Row[Any]]]] = {}
    incomplete = set()
    for placement in first.values():
        row = rows.get(placement.instance_id)
        if row is not None and _still_pending(row):
            units.setdefault(row.group_id or row.id, []).append((placement, row))
        elif row is not None:
            incomplete.add(row.group_id)
    return [unit for key, unit in units.items() if key not in incomplete]


def _still_pending(row: Row[Any]) -> bool:
    return row.state is State.PENDING and row.desired_state is DesiredState.RUNNING and row.deleted_at is None


# Statements on the tables, not on the mapped classes: the ORM would double the cost of each row.
_INSTANCES = cast(Table, Instance.__table__)
_PLACED = ("node_id", "node_generation", "cpu_milli", "memory_mib", "disk_mib", "placed_as", "simulated")
_SCHEDULE_EACH = (
    update(_INSTANCES)
    .where(_INSTANCES.c.id == bindparam("instance_id"))
    .values(
        state=State.SCHEDULED,
        reason=None,
        version=_INSTANCES.c.version + 1,
        attempt=_INSTANCES.c.attempt + 1,
        scheduled_at=bindparam("at"),
        **{name: bindparam(f"new_{name}") for name in _PLACED},
    )
)
# On PostgreSQL one statement for all rows takes a third of the time.
_SCHEDULE_ALL = text(
    """
    UPDATE instances SET
        state = 'scheduled', reason = NULL, version = version + 1, attempt = attempt + 1, scheduled_at = :at,
        node_id = given.node_id, node_generation = given.node_generation, cpu_milli = given.cpu_milli,
        memory_mib = given.memory_mib, disk_mib = given.disk_mib, placed_as = given.placed_as,
        simulated = given.simulated
    FROM unnest(
        CAST(:instance_id AS text[]), CAST(:new_node_id AS text[]), CAST(:new_node_generation AS bigint[]),
        CAST(:new_cpu_milli AS integer[]), CAST(:new_memory_mib AS integer[]),
        CAST(:new_disk_mib AS integer[]), CAST(:new_placed_as AS json[]), CAST(:new_simulated AS boolean[])
    ) AS given (id, node_id, node_generation, cpu_milli, memory_mib, disk_mib, placed_as, simulated)
    WHERE instances.id = given.id
    """
)
_ALLOCATE_EACH = insert(cast(Table, Allocation.__table__))
_ALLOCATE_ALL = text(
    """
    INSERT INTO allocations (gpu_uuid, instance_id, project_id, attempt, milli, mig_uuid, from_at)
    SELECT * FROM unnest(
        CAST(:gpu_uuid AS text[]), CAST(:instance_id AS text[]), CAST(:project_id AS text[]),
        CAST(:attempt AS integer[]), CAST(:milli AS integer[]), CAST(:mig_uuid AS text[]),
        CAST(:from_at AS timestamptz[])
    )
    """
)


def _write(session: Session, placed: Unit, nodes: Rows) -> None:
    node_ids = {placement.node_id for placement, _row in placed}
    revisions.notify_nodes(session, node_ids)
    _schedule(session, [_values(placement, row, nodes[placement.node_id]) for placement, row in placed])
    _allocate(session, [entry for placement, row in placed for entry in _entries(placement, row)])
    for _placement, row in placed:
        events.instance_moved(session, row, row.state, State.SCHEDULED, row.version + 1, None)
    if any(row.group_id for _placement, row in placed):
        group_members.moved(session)
    _expire(session, {row.id for _placement, row in placed} | node_ids)


def _schedule(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    at = now()
    if _is_postgresql(session):
        arrays = _arrays(rows)
        arrays["new_placed_as"] = [json.dumps(placed_as) for placed_as in arrays["new_placed_as"]]
        session.connection().execute(_SCHEDULE_ALL, {**arrays, "at": at})
    else:
        session.connection().execute(_SCHEDULE_EACH, [{**row, "at": at} for row in rows])


def _allocate(session: Session, entries: Sequence[dict[str, Any]]) -> None:
    """Raises IntegrityError if a GPU would be allocated twice: see the triggers of migration 0003."""
    if not entries:
        return
    if _is_postgresql(session):
        session.connection().execute(_ALLOCATE_ALL, _arrays(entries))
    else:
        session.connection().execute(_ALLOCATE_EACH, entries)


def _is_postgresql(session: Session) -> bool:
    return session.get_bind().dialect.name == "postgresql"


def _arrays(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _values(placement: Placement, row: Row[Any], node: Row[Any]) -> dict[str, Any]:
    facts = node.facts
    simulated_gpus = row.gpu_count > 0 and bool(facts.get("simulated_gpus"))
    return {
        "instance_id": row.id,
        "new_node_id": node.id,
        "new_node_generation": node.generation + 1,
        "new_cpu_milli": placement.cpu_milli,
        "new_memory_mib": placement.memory_mib,
        "new_disk_mib": placement.disk_mib,
        "new_placed_as": {
            "isolation": _isolation(placement.allocations, mps=bool(facts.get("mps"))),
            "link_score": placement.link_score,
            "borrowed": placement.borrowed,
        },
        "new_simulated": simulated_gpus or bool(facts.get("simulated_containers")),
    }


def _isolation(gpus: Sequence[GpuAllocation], *, mps: bool) -> str | None:
    """How its GPUs are isolated from other instances; see schemas/instances.py."""
    if not gpus:
        return None
    if any(gpu.mig_uuid for gpu in gpus):
        return "mig"
    if all(gpu.milli == WHOLE_MILLI for gpu in gpus):
        return "exclusive"
    return "mps" if mps else "shared"


def _entries(placement: Placement, row: Row[Any]) -> list[dict[str, Any]]:
    return allocations.entries(row.id, row.project_id, row.attempt + 1, placement.allocations)


def _expire(session: Session, ids: Collection[str]) -> None:
    """Expire loaded objects of rows that the statements above have changed."""
    for loaded in list(session.identity_map.values()):
        if isinstance(loaded, Instance | Node) and loaded.id in ids:
            session.expire(loaded)
