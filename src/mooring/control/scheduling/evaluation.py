"""What the scheduler makes of one state of the cluster, computed once for all requests that ask about it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain import forecasts
from mooring.scheduler.explain.reasons import FittingAlternatives, would_fit
from mooring.scheduler.explain.reasons import explain as refusals_of
from mooring.scheduler.feasibility import quotas as rules
from mooring.scheduler.model import (
    Forecast,
    Over,
    Placement,
    ProjectView,
    Quota,
    Refusal,
    Request,
    ResourceUsage,
    SchedulingPlan,
    Snapshot,
    Unplaced,
)
from mooring.scheduler.queue import Ahead, Shares
from mooring.scheduler.schedule import schedule

# An evaluation is used for this long at most: what projects have used of late and the ends that were declared
# change with time alone.
KEPT_S = 2.0
# About 20 MiB. An outcome on 10,000 nodes has 10,000 refusals.
MOST_REFUSALS = 100_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scheduler says of one request in one state of the cluster."""

    placement: Placement | None
    refusals: tuple[Refusal, ...]
    alternatives: FittingAlternatives | None
    over: Over | None = None  # the quota that it waits for
    unplaced: Unplaced | None = None  # why it waits, in a sentence
    position: int | None = None  # in the queue, from 1, if it waits
    forecast: Forecast | None = None  # when it will start, as far as declared durations tell
    ahead: tuple[Ahead, ...] = ()  # the first of those that come before it
    max_duration_now_s: int | None = None  # with a declared end so near it would start now
    snapshot: Snapshot | None = None  # all that this is about


class Evaluation:
    """One snapshot, and what was computed of it so far. For one thread at a time.

    Args:
        memory: of the scheduler, shared with other evaluations.
        forecast_memory: of the scheduler; nothing else may use it while this evaluation is used.
    """

    def __init__(self, snapshot: Snapshot, memory: CycleCache, forecast_memory: CycleCache) -> None:
        self.snapshot = snapshot
        self._memory = memory
        self._forecast_memory = forecast_memory
        self._outcomes: dict[str, Outcome] = {}
        self._refusals = 0

    def still_holds(self, snapshot: Snapshot) -> bool:
        """Whether nothing that decides has changed since, so that this is an evaluation of `snapshot` too."""
        own = self.snapshot
        return (
            snapshot.nodes is own.nodes
            and snapshot.requests == own.requests
            and snapshot.quotas == own.quotas
            and snapshot.promised == own.promised
            and snapshot.potential is own.potential
            and _unused(snapshot.projects) == _unused(own.projects)
            and abs(snapshot.now - own.now) < KEPT_S
        )

    @cached_property
    def requests(self) -> Mapping[str, Request]:
        """All that wait, by the id of the instance."""
        return {request.instance_id: request for request in self.snapshot.requests}

    @cached_property
    def line(self) -> forecasts.Line:
        return forecasts.line(self.snapshot, self._memory)

    @cached_property
    def shares(self) -> Shares:
        self._memory.update(self.snapshot.nodes)
        return Shares(self.snapshot, self._memory.cluster.held, self._memory.cluster.total)

    @cached_property
    def holders(self) -> frozenset[str]:
        """Projects that hold something."""
        self._memory.update(self.snapshot.nodes)
        return frozenset(self._memory.cluster.held)

    def of(self, request: Request) -> Outcome:
        """What is said of one of the snapshot's requests."""
        found = self._outcomes.get(request.instance_id)
        return self._kept(request.instance_id, self._outcome(request)) if found is None else found

    def of_one_more(self, request: Request, quota: Quota | None) -> Outcome:
        """What would be said of a request that nobody has made.

        Args:
            quota: of its project, if that has one, as it would be with the request.
        """
        asked = repr((replace(request, queued_at=0.0), quota))
        if (found := self._outcomes.get(asked)) is not None:
            return found
        own = self.snapshot
        quotas = own.quotas if quota is None else {**own.quotas, request.project_id: quota}
        supposed = replace(own, requests=(*own.requests, request), quotas=quotas)
        # Asked once, so that one memory can serve it all.
        return self._kept(asked, Evaluation(supposed, self._memory, self._memory).of(request))

    def _kept(self, key: str, outcome: Outcome) -> Outcome:
        self._refusals += len(outcome.refusals)
        if self._refusals > MOST_REFUSALS:
            self._outcomes.clear()
            self._refusals = len(outcome.refusals)
        self._outcomes[key] = outcome
        return outcome

    @cached_property
    def _plan(self) -> SchedulingPlan:
        return schedule(self.snapshot, self._memory)

    @cached_property
    def _placements(self) -> Mapping[str, Placement]:
        return {each.instance_id: each for each in self._plan.placements}

    @cached_property
    def _unplaced(self) -> Mapping[str, Unplaced]:
        return {each.instance_id: each for each in self._plan.unplaced}

    @cached_property
    def _forecasts(self) -> forecasts.Forecasts:
        return forecasts.Forecasts(self.snapshot, self._forecast_memory)

    def _outcome(self, request: Request) -> Outcome:
        snapshot, instance_id = self.snapshot, request.instance_id
        request = replace(request, quota=snapshot.quotas.get(request.project_id))
        placed, told = self._placements.get(instance_id), self._unplaced.get(instance_id)
        nodes = [node for node in snapshot.nodes if placed is None or node.id != placed.node_id]
        refused = refusals_of(nodes, request, snapshot.at)
        if placed is not None:
            return Outcome(placed, refused, None)
        return Outcome(
            None,
            refused,
            would_fit(snapshot.nodes, in_its_place(request), snapshot.at, self._memory),
            over=told.over if told else None,
            unplaced=told,
            position=self.line.position(instance_id),
            ahead=self.line.ahead(instance_id),
            max_duration_now_s=forecasts.max_duration_now(snapshot, instance_id, self._memory),
            # Last: where both memories are one, nothing else may use it afterwards.
            forecast=self._forecasts.of(instance_id),
            snapshot=snapshot,
        )


def in_its_place(request: Request) -> Request:
    """Something else instead of it: the quota counts what others wait for, but not the request itself."""
    return replace(request, quota=rules.without(request.quota, request)) if request.quota else request


def _unused(projects: Mapping[str, ProjectView]) -> Mapping[str, ProjectView]:
    """Without what they have used, which is less at every moment."""
    return {project_id: replace(each, used=ResourceUsage()) for project_id, each in projects.items()}
