"""The queue in the scheduler's order, and the usage of each project."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from sqlalchemy.orm import Session

from mooring.control.scheduling.cache import SchedulerCache
from mooring.scheduler.feasibility.needs import gpu_milli
from mooring.scheduler.model import Forecast, ProjectView, Request, Snapshot
from mooring.scheduler.queue import ProjectShares
from mooring.scheduler.queue_order import Because, QueueOrder, because
from mooring_client.schemas.spec import WHOLE_MILLI


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


class QueueEntries(Sequence[QueueEntry]):
    """Made as they are read: a page needs few of thousands."""

    def __init__(self, order: QueueOrder, forecasts: Mapping[str, Forecast]) -> None:
        self._order = order
        self._forecasts = forecasts

    def __len__(self) -> int:
        return len(self._order.units)

    @overload
    def __getitem__(self, index: int) -> QueueEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[QueueEntry]: ...
    def __getitem__(self, index: int | slice) -> QueueEntry | Sequence[QueueEntry]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        order, members = self._order, self._order.units[index].members
        return QueueEntry(
            position=order.positions[index],
            members=members,
            behind=because(order.rank(index - 1), order.rank(index)) if index else None,
            forecast=next(filter(None, (self._forecasts.get(each.instance_id) for each in members)), None),
        )


@dataclass(frozen=True, slots=True)
class QueueView:
    entries: QueueEntries
    standings: dict[str, ProjectStanding]  # of projects with pending instances, allocations or recent usage


def view(session: Session, cache: SchedulerCache) -> QueueView:
    """The current queue, with the backfill slots of the last scheduling cycle."""
    last_cycle = cache.last_cycle
    forecasts = {each.instance_id: each for each in last_cycle.plan.forecasts} if last_cycle else {}
    with cache.evaluating(session) as evaluation:
        return QueueView(
            QueueEntries(evaluation.line, forecasts),
            _standings(evaluation.snapshot, evaluation.shares, evaluation.waiting | evaluation.holders),
        )


def _standings(
    snapshot: Snapshot, shares: ProjectShares, in_use: Collection[str]
) -> dict[str, ProjectStanding]:
    return {
        project_id: ProjectStanding(
            project, shares.held(project_id).gpu_milli / WHOLE_MILLI, shares.dominant(project_id)
        )
        for project_id, project in sorted(snapshot.projects.items())
        if project_id in in_use or project.used.gpu_s or project.used.cpu_s
    }
