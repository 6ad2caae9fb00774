"""What projects have used of late, halved with every half-life: the basis of fair share.

Sampled: what is held when this looks counts for all the time since it last did. What began when nobody looked
counts from then on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.db.tables import Project, ProjectUsage
from mooring.db.types import now
from mooring.scheduler import model

# Between two samples, about.
INTERVAL_S = 10.0


def projects(session: Session, half_life_s: float) -> dict[str, model.ProjectView]:
    """What the order of the queue depends on, of every project."""
    moment = now()
    columns = (Project.id, Project.weight, Project.guaranteed_gpus, ProjectUsage)
    query = select(*columns).outerjoin(ProjectUsage, ProjectUsage.project_id == Project.id)
    return {
        project_id: model.ProjectView(
            weight=weight,
            used=_decayed(used, moment, half_life_s),
            guaranteed_gpu_milli=None if guaranteed is None else guaranteed * WHOLE_MILLI,
        )
        for project_id, weight, guaranteed, used in session.execute(query.where(Project.deleted_at.is_(None)))
    }


def _decayed(row: ProjectUsage | None, moment: datetime, half_life_s: float) -> model.ResourceUsage:
    if row is None:
        return model.ResourceUsage()
    left = 0.5 ** (max(0.0, (moment - row.as_of).total_seconds()) / half_life_s)
    return model.ResourceUsage(row.gpu_s * left, row.cpu_s * left, row.memory_mib_s * left)


def count(
    session: Session, nodes: Iterable[model.NodeView], half_life_s: float, within_s: float = inf
) -> None:
    """Add what is held now to what was used, for the time since the last sample.

    Args:
        within_s: no more time than this has passed, whatever wall clocks say; infinite if nobody knows.
    """
    locks.placing(session)  # one replica at a time
    moment = now()
    rows = {row.project_id: row for row in session.scalars(select(ProjectUsage))}
    since_last = {
        key: min(within_s, max(0.0, (moment - row.as_of).total_seconds())) for key, row in rows.items()
    }
    for project_id, added in _held(nodes, since_last, within_s, moment.timestamp()).items():
        row = rows.get(project_id)
        used = _decayed(row, moment, half_life_s)
        if row is None:
            row = ProjectUsage(project_id=project_id)
            session.add(row)
        row.as_of = moment
        row.gpu_s = used.gpu_s + added.gpu_s
        row.cpu_s = used.cpu_s + added.cpu_s
        row.memory_mib_s = used.memory_mib_s + added.memory_mib_s


@dataclass(slots=True)
class _Added:
    gpu_s: float = 0.0
    cpu_s: float = 0.0
    memory_mib_s: float = 0.0


def _held(
    nodes: Iterable[model.NodeView], since_last: Mapping[str, float], within_s: float, moment: float
) -> dict[str, _Added]:
    """By project, what is held times how long.

    Args:
        since_last: seconds since the last sample of a project. It may be long ago, when nobody looked or the
            project held nothing: then what is held counts from when it was placed.
    """
    found: dict[str, _Added] = {}
    for running in (each for node in nodes for each in node.running):
        seconds = min(since_last.get(running.project_id, within_s), max(INTERVAL_S, moment - running.since))
        added = found.setdefault(running.project_id, _Added())
        added.gpu_s += running.gpu_milli / 1000 * seconds
        added.cpu_s += running.cpu_milli / 1000 * seconds
        added.memory_mib_s += running.memory_mib * seconds
    return found
