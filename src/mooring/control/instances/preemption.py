"""Preemption: applies the evictions of a scheduling plan, checked again under locks, and requeues victims."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.instances import instances
from mooring.core.instance.state import ENDED, HOLDS_GPUS
from mooring.db.tables import Instance, Node, Project
from mooring.db.types import now
from mooring.scheduler.model import Eviction
from mooring_client.schemas.spec import WHOLE_MILLI
from mooring_client.schemas.states import DesiredState, Reason, State

CODE = "preempted"
_RUNNING = HOLDS_GPUS - {State.STOPPING, State.UNREACHABLE}


def evict(
    session: Session, evictions: Sequence[Eviction], min_run_s: float, stopping: Collection[str]
) -> list[str]:
    """Stop the victims that may still be preempted: all of the victims of a pending instance, or none.

    The plan was made from a snapshot. This checks again that the beneficiary is pending and may preempt the
    victim, and that the victim has run for long enough. All members of a victim's group are stopped with the
    victim: they cannot run without it, and are placed again together.

    Args:
        stopping: instances that were stopping when the plan was made.

    Returns:
        The ids of the instances that are being stopped.
    """
    locks.placing(session)
    if _others_evicted(session, stopping):
        return []
    members = _group_members(session, {eviction.instance_id for eviction in evictions})
    nodes = locks.nodes(session, {each.node_id for each in evictions} | set(filter(None, members.values())))
    ids = {key for each in evictions for key in (each.instance_id, each.for_instance_id)}
    rows = locks.instances(session, ids | members.keys())
    guard = _Guard(session, rows, min_run_s)
    evicted = []
    for beneficiaries, for_them in _by_beneficiaries(evictions, rows).items():
        if not guard.allows(beneficiaries, for_them):
            continue
        for eviction in for_them:
            reason = guard.reason(beneficiaries, eviction)
            for row in _with_its_group(rows[eviction.instance_id], rows):
                _stop(session, row, nodes[row.node_id or ""], reason)
                evicted.append(row.id)
    return evicted


def _others_evicted(session: Session, stopping: Collection[str]) -> bool:
    """Whether another replica has preempted since the snapshot: this plan would then stop too many."""
    query = select(Instance.id).where(
        Instance.state == State.STOPPING,
        Instance.deleted_at.is_(None),
        Instance.reason["code"].as_string() == CODE,
    )
    return not set(session.scalars(query)).issubset(stopping)


def _group_members(session: Session, victims: Collection[str]) -> dict[str, str | None]:
    """All members of the victims' groups by id, with their nodes' ids."""
    groups = select(Instance.group_id).where(Instance.id.in_(victims), Instance.group_id.is_not(None))
    query = select(Instance.id, Instance.node_id).where(Instance.group_id.in_(groups))
    return dict(session.execute(query.where(Instance.deleted_at.is_(None))).all())


def _with_its_group(victim: Instance, rows: Mapping[str, Instance]) -> list[Instance]:
    """The victim, or all running members of its group."""
    if victim.group_id is None:
        return [victim]
    return [row for row in rows.values() if row.group_id == victim.group_id and _runs(row)]


def _by_beneficiaries(
    evictions: Iterable[Eviction], rows: Mapping[str, Instance]
) -> dict[tuple[str, ...], list[Eviction]]:
    """Evictions by their beneficiaries: a single instance, or the members of a group."""
    by_unit: dict[str, list[Eviction]] = {}
    for eviction in evictions:
        row = rows.get(eviction.for_instance_id)
        by_unit.setdefault((row and row.group_id) or eviction.for_instance_id, []).append(eviction)
    return {tuple(sorted({each.for_instance_id for each in unit})): unit for unit in by_unit.values()}


@dataclass(slots=True)
class _Holding:
    """A project's allocated GPUs, without those of stopping instances, and its guarantee; in milli-GPUs."""

    held: int
    guaranteed: int

    @property
    def borrows(self) -> bool:
        return self.held > self.guaranteed


class _Guard:
    """Checks evictions against locked rows; evictions that it allows count as done for later ones."""

    def __init__(self, session: Session, rows: Mapping[str, Instance], min_run_s: float) -> None:
        self._rows = rows
        self._placed_before = now() - timedelta(seconds=min_run_s)
        self._holdings = _holdings(session, {row.project_id for row in rows.values()})

    def allows(self, beneficiaries: Sequence[str], evictions: Sequence[Eviction]) -> bool:
        """Whether all these evictions are allowed; if so, they are counted."""
        pending = [row for key in beneficiaries if (row := self._rows.get(key)) and _is_pending(row)]
        if len(pending) < len(beneficiaries):
            return False
        counted: dict[str, Instance] = {}
        for eviction in evictions:
            victim = self._rows.get(eviction.instance_id)
            if victim is None or not self._may_stop(eviction, victim, pending):
                self._count(counted.values(), +1)  # undo
                return False
            stopped = [row for row in _with_its_group(victim, self._rows) if row.id not in counted]
            counted.update((row.id, row) for row in stopped)
            self._count(stopped, -1)
        return True

    def _count(self, rows: Iterable[Instance], sign: int) -> None:
        for row in rows:
            self._holdings[row.project_id].held += sign * row.gpu_milli

    def _may_stop(self, eviction: Eviction, victim: Instance, pending: Sequence[Instance]) -> bool:
        ran_enough = victim.scheduled_at is not None and victim.scheduled_at <= self._placed_before
        if not (ran_enough and _runs(victim)) or victim.node_id != eviction.node_id:
            return False
        if victim.preemptible and victim.priority < min(row.priority for row in pending):
            return True
        may_take = victim.preemptible or self._holdings[victim.project_id].borrows
        return may_take and self._may_reclaim(victim, pending)

    def _may_reclaim(self, victim: Instance, pending: Sequence[Instance]) -> bool:
        project_id = pending[0].project_id
        if project_id == victim.project_id or not victim.gpu_milli:
            return False
        holding = self._holdings[project_id]
        return holding.held + sum(row.gpu_milli for row in pending) <= holding.guaranteed

    def reason(self, beneficiaries: Sequence[str], eviction: Eviction) -> Reason:
        """The victim's reason. Of the other tenant, it reveals only why that tenant may preempt."""
        if eviction.because == "reclaim":
            return Reason(code=CODE, message="preempted by a project that needs its guaranteed GPUs")
        priority = min(self._rows[key].priority for key in beneficiaries)
        return Reason(code=CODE, message=f"preempted by an instance of priority {priority}")


def _is_pending(row: Instance) -> bool:
    return row.state is State.PENDING and row.desired_state is DesiredState.RUNNING and row.deleted_at is None


def _runs(row: Instance) -> bool:
    return row.desired_state is DesiredState.RUNNING and row.state in _RUNNING


def _holdings(session: Session, project_ids: Collection[str]) -> dict[str, _Holding]:
    held = (
        select(Instance.project_id, func.sum(Instance.gpu_milli))
        .where(Instance.project_id.in_(project_ids), Instance.state.in_(HOLDS_GPUS - {State.STOPPING}))
        .group_by(Instance.project_id)
    )
    sums = {project_id: int(milli) for project_id, milli in session.execute(held)}
    query = select(Project.id, Project.guaranteed_gpus).where(Project.id.in_(project_ids))
    return {
        project_id: _Holding(sums.get(project_id, 0), (guaranteed or 0) * WHOLE_MILLI)
        for project_id, guaranteed in session.execute(query)
    }


def _stop(session: Session, row: Instance, node: Node, reason: Reason) -> None:
    spec = instances.spec_of(row)
    instances.end(session, row, node, DesiredState.STOPPED, spec.preemption_grace_s, reason)
    row.requeue = spec.on_preemption == "requeue"


def requeue(session: Session, row: Instance, node: Node | None) -> None:
    """Queue a preempted instance again if it has ended, at its old place in the queue."""
    if row.requeue and row.state in ENDED and row.desired_state is DesiredState.STOPPED:
        message = "preempted; it waits to be placed again"
        queued_at = row.queued_at
        instances.queue_again(session, row, node, Reason(code=CODE, message=message))
        row.queued_at = queued_at
