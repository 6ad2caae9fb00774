"""I1, I8 and I10: the allocations in the database."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Allocation, Instance, InstanceRecord, Project
from mooring_client.schemas.states import State

_WHOLE = 1000
_FAR = datetime.max.replace(tzinfo=UTC)


def violations(session: Session) -> Iterator[str]:
    by_gpu: dict[str, list[Allocation]] = defaultdict(list)
    by_attempt: dict[tuple[str, int], list[Allocation]] = defaultdict(list)
    for row in session.scalars(select(Allocation).order_by(Allocation.id)):
        by_gpu[row.gpu_uuid].append(row)
        if row.lost_node_id is None:
            by_attempt[row.instance_id, row.attempt].append(row)
        if row.to_at is not None and row.to_at < row.from_at:
            yield f"I8: an interval of {row.gpu_uuid} is negative"
    for uuid, rows in by_gpu.items():
        yield from _overlaps(uuid, rows)
    yield from _attempts(session, by_attempt)
    yield from _quotas(session)


def _overlaps(uuid: str, rows: Sequence[Allocation]) -> Iterator[str]:
    """The parts of a GPU that are allocated at the same time are at most one GPU."""
    changes = [(row.from_at, 1, row) for row in rows] + [(row.to_at or _FAR, 0, row) for row in rows]
    live: dict[int, Allocation] = {}
    for _at, begins, row in sorted(changes, key=lambda change: change[:2]):
        if not begins:
            live.pop(row.id, None)
            continue
        if row.from_at == row.to_at:
            continue
        live[row.id] = row
        migs = [one.mig_uuid for one in live.values() if one.mig_uuid is not None]
        if sum(one.milli for one in live.values()) > _WHOLE or len(migs) != len(set(migs)):
            holders = sorted({f"{one.instance_id}/{one.attempt}" for one in live.values()})
            yield f"I1: {uuid} was allocated twice: {holders}"
            return


def _attempts(session: Session, by_attempt: dict[tuple[str, int], list[Allocation]]) -> Iterator[str]:
    """All GPUs of an attempt are allocated and released together."""
    counts = dict(session.execute(select(Instance.id, Instance.gpu_count)).all())
    counts |= dict(session.execute(select(InstanceRecord.id, InstanceRecord.gpu_count)).all())
    for (instance, attempt), rows in by_attempt.items():
        intervals = {(row.from_at, row.to_at) for row in rows}
        if len(intervals) != 1:
            yield f"I8: the GPUs of {instance}/{attempt} have {len(intervals)} intervals"
        if instance in counts and len(rows) != counts[instance]:
            yield f"I8: {instance}/{attempt} has {len(rows)} GPUs, and asked for {counts[instance]}"
    holding = select(Instance.id, Instance.attempt, Instance.gpu_count).where(
        Instance.state.in_(HOLDS_GPUS), Instance.gpu_count > 0
    )
    live = {key for key, rows in by_attempt.items() if rows[0].to_at is None}
    for instance, attempt, _count in session.execute(holding):
        if (instance, attempt) not in live:
            yield f"I8: {instance}/{attempt} should have GPUs, and has none"
        live.discard((instance, attempt))
    for instance, attempt in sorted(live):
        yield f"I8: the GPUs of {instance}/{attempt} are allocated, and its instance has ended"


def _quotas(session: Session) -> Iterator[str]:
    """I10. The checks assume that no quota was lowered below what was in use."""
    active = select(Instance.project_id, func.sum(Instance.gpu_milli), func.count()).where(
        Instance.state.in_({State.PENDING, *HOLDS_GPUS})
    )
    quotas = dict(session.execute(select(Project.id, Project.quotas)).all())
    for project, milli, count in session.execute(active.group_by(Instance.project_id)):
        limits = quotas[project]
        for name, used in (("gpus", milli / _WHOLE), ("instances", count)):
            if limits.get(name) is not None and used > limits[name]:
                yield f"I10: {project} uses {used} of {limits[name]} {name}"
