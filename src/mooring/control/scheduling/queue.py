"""The queue in the scheduler's order, and the usage of each project."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.explain.forecasts import QueueOrder
from mooring.scheduler.feasibility.needs import gpu_milli
from mooring.scheduler.model import Forecast, ProjectView, Request, Snapshot
from mooring.scheduler.queue import Because, ProjectShares, because


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An instance, or the pending members of a group, which are placed together.

    Attributes:
        behind: why this entry is behind the previous one; None for the first entry.
        forecast: its backfill slot, if any.
    """

    position: int
    members: tuple[Request, ...]
    behind: Because | None
    forecast: Forecast | None

    @property
    def first(self) -> Request:
        return self.members[0]

    @property
    def group_id(self) -> str | None:
        return self.first.gang.group_id if self.first.gang else None

    @property
    def gpus(self) -> float:
        return sum(map(gpu_milli, self.members)) / WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class ProjectStanding:
    """A project's allocated GPUs, its recent usage and its dominant share."""

    project: ProjectView
    gpus: float
    dominant_share: float


@dataclass(frozen=True, slots=True)
class QueueView:
    entries: Sequence[QueueEntry]
    standings: dict[str, ProjectStanding]  # of projects with pending instances, allocations or recent usage


def view(session: Session, cache: SchedulerCache) -> QueueView:
    """The current queue, with the backfill slots of the last scheduling cycle."""
    last_cycle = cache.last_cycle
    forecasts = {each.instance_id: each for each in last_cycle.plan.forecasts} if last_cycle else {}
    with cache.evaluating(session) as evaluation:
        return QueueView(
            list(_entries(evaluation.snapshot, evaluation.line, forecasts)),
            _standings(evaluation.snapshot, evaluation.shares, evaluation.holders),
        )


def _standings(
    snapshot: Snapshot, shares: ProjectShares, holders: Collection[str]
) -> dict[str, ProjectStanding]:
    waiting = {request.project_id for request in snapshot.requests}
    return {
        project_id: ProjectStanding(
            project, shares.held(project_id).gpu_milli / WHOLE_MILLI, shares.dominant(project_id)
        )
        for project_id, project in sorted(snapshot.projects.items())
        if project_id in waiting or project_id in holders or project.used.gpu_s or project.used.cpu_s
    }


def _entries(snapshot: Snapshot, line: QueueOrder, forecasts: dict[str, Forecast]) -> Iterator[QueueEntry]:
    requests = {request.instance_id: request for request in snapshot.requests}
    index = 0
    while index < len(line.instance_ids):
        members = _members_at(line, requests, index)
        yield QueueEntry(
            position=index + 1,
            members=members,
            behind=because(line.ranks[index - 1], line.ranks[index]) if index else None,
            forecast=next(filter(None, (forecasts.get(each.instance_id) for each in members)), None),
        )
        index += len(members)


def _members_at(line: QueueOrder, requests: dict[str, Request], index: int) -> tuple[Request, ...]:
    """The members of the entry at this index: one request, or all of a gang, which are adjacent."""
    first = requests[line.instance_ids[index]]
    if first.gang is None:
        return (first,)
    members = [first]
    for instance_id in line.instance_ids[index + 1 :]:
        other = requests[instance_id]
        if other.gang is None or other.gang.group_id != first.gang.group_id:
            break
        members.append(other)
    return tuple(members)
