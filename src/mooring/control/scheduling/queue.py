"""The queue in the scheduler's order, and the usage of each project."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from mooring.control.scheduling.cache import SchedulerCache
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.explain.forecasts import Line
from mooring.scheduler.feasibility.needs import gpu_milli
from mooring.scheduler.model import Forecast, ProjectView, Request, Snapshot
from mooring.scheduler.queue import Because, Shares, because


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An instance, or the pending members of a group, which are placed together.

    Attributes:
        behind: why the previous entry comes first; None for the first entry.
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


def _standings(snapshot: Snapshot, shares: Shares, holders: Collection[str]) -> dict[str, ProjectStanding]:
    waiting = {request.project_id for request in snapshot.requests}
    return {
        project_id: ProjectStanding(
            project, shares.held(project_id).gpu_milli / WHOLE_MILLI, shares.dominant(project_id)
        )
        for project_id, project in sorted(snapshot.projects.items())
        if project_id in waiting or project_id in holders or project.used.gpu_s or project.used.cpu_s
    }


def _entries(snapshot: Snapshot, ordered: Line, forecasts: dict[str, Forecast]) -> Iterator[QueueEntry]:
    requests = {request.instance_id: request for request in snapshot.requests}
    place = 0
    while place < len(ordered.instance_ids):
        members = _members_at(ordered, requests, place)
        rank, before = ordered.ranks[place], ordered.ranks[place - 1] if place else None
        yield QueueEntry(
            place + 1,
            members,
            because(before, rank) if before is not None else None,
            next((forecasts[each.instance_id] for each in members if each.instance_id in forecasts), None),
        )
        place += len(members)


def _members_at(ordered: Line, requests: dict[str, Request], place: int) -> tuple[Request, ...]:
    """The entry at this place: one request, or all of a gang, which are adjacent."""
    first = requests[ordered.instance_ids[place]]
    if first.gang is None:
        return (first,)
    members = [first]
    for instance_id in ordered.instance_ids[place + 1 :]:
        other = requests[instance_id]
        if other.gang is None or other.gang.group_id != first.gang.group_id:
            break
        members.append(other)
    return tuple(members)
