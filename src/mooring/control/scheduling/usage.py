"""Recent usage of projects, which decays with a half-life: the basis of fair share.

Usage is sampled: current allocations count for the time since the last sample, or since they were made, if
that was later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.core.policy import Policy
from mooring.db.tables import Project, ProjectUsage
from mooring.db.types import now
from mooring.scheduler import model
from mooring_client.schemas.spec import WHOLE_MILLI

# Approximate time between two samples.
INTERVAL_S = 10.0


def projects(session: Session, policy: Policy) -> dict[str, model.ProjectView]:
    """Every project with what the order of the queue depends on."""
    at = now()
    columns = (Project.id, Project.weight, Project.guaranteed_gpus, ProjectUsage)
    query = select(*columns).outerjoin(ProjectUsage, ProjectUsage.project_id == Project.id)
    return {
        project_id: model.ProjectView(
            weight=weight,
            used=_decayed(used, at, policy),
            guaranteed_gpu_milli=None if guaranteed is None else guaranteed * WHOLE_MILLI,
        )
        for project_id, weight, guaranteed, used in session.execute(query.where(Project.deleted_at.is_(None)))
    }


def _decayed(row: ProjectUsage | None, at: datetime, policy: Policy) -> model.ResourceUsage:
    if row is None:
        return model.ResourceUsage()
    factor = 0.5 ** (max(0.0, (at - row.as_of).total_seconds()) / policy.usage_half_life_s)
    return model.ResourceUsage(row.gpu_s * factor, row.cpu_s * factor, row.memory_mib_s * factor)


def add_sample(
    session: Session, nodes: Iterable[model.NodeView], policy: Policy, within_s: float = inf
) -> None:
    """Add the current allocations, times the seconds since the last sample, to the recent usage.

    Args:
        within_s: upper bound of the time since the last sample, whatever the wall clock says.
    """
    locks.placing(session)  # one replica at a time
    at = now()
    rows = {row.project_id: row for row in session.scalars(select(ProjectUsage))}
    since_last = {key: min(within_s, max(0.0, (at - row.as_of).total_seconds())) for key, row in rows.items()}
    for project_id, added in _increases(nodes, since_last, within_s, at.timestamp()).items():
        row = rows.get(project_id)
        used = _decayed(row, at, policy)
        if row is None:
            row = ProjectUsage(project_id=project_id)
            session.add(row)
        row.as_of = at
        row.gpu_s = used.gpu_s + added.gpu_s
        row.cpu_s = used.cpu_s + added.cpu_s
        row.memory_mib_s = used.memory_mib_s + added.memory_mib_s


@dataclass(slots=True)
class _Increase:
    gpu_s: float = 0.0
    cpu_s: float = 0.0
    memory_mib_s: float = 0.0


def _increases(
    nodes: Iterable[model.NodeView], since_last: Mapping[str, float], within_s: float, at: float
) -> dict[str, _Increase]:
    """Allocations times seconds, by project.

    Args:
        since_last: seconds since the last sample of a project. Instances that were placed later count since
            their placement, but for at least `INTERVAL_S`.
    """
    found: dict[str, _Increase] = {}
    for running in (each for node in nodes for each in node.running):
        seconds = min(since_last.get(running.project_id, within_s), max(INTERVAL_S, at - running.since))
        added = found.setdefault(running.project_id, _Increase())
        added.gpu_s += running.gpu_milli / 1000 * seconds
        added.cpu_s += running.cpu_milli / 1000 * seconds
        added.memory_mib_s += running.memory_mib * seconds
    return found
