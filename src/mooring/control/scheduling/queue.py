"""The queue as the scheduler sees it, and where one that waits stands in it."""

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
    """What is placed as one: an instance, or the members of a group that wait.

    Attributes:
        behind: why the one before it comes first; null for the first.
        forecast: what is reserved for it; null where nothing is.
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
class Standing:
    """What a project holds, has used of late, and comes to by that."""

    project: ProjectView
    gpus: float
    dominant_share: float


@dataclass(frozen=True, slots=True)
class QueueView:
    entries: Sequence[QueueEntry]
    standings: dict[str, Standing]  # of the projects that wait, hold or have used something


def look(session: Session, world: SchedulerCache) -> QueueView:
    """All that waits at this moment; the moments kept for it are those of the scheduler's last look."""
    decided = world.decided
    forecasts = {each.instance_id: each for each in decided.plan.forecasts} if decided else {}
    with world.evaluating(session) as evaluation:
        return QueueView(
            list(_entries(evaluation.snapshot, evaluation.line, forecasts)),
            _standings(evaluation.snapshot, evaluation.shares, evaluation.holders),
        )


def _standings(snapshot: Snapshot, shares: Shares, holders: Collection[str]) -> dict[str, Standing]:
    waiting = {request.project_id for request in snapshot.requests}
    return {
        project_id: Standing(
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
    """Members of a gang stand together."""
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
