"""What the scheduler decides in one state of the cluster, computed once and shared by all callers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from cachetools import LRUCache

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
    Snapshot,
    Unplaced,
)
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.queue import ProjectShares
from mooring.scheduler.queue_order import Ahead, QueueOrder
from mooring.scheduler.schedule import schedule

# Maximum age of an evaluation: recent usage and declared end times change with time alone.
MAX_AGE_S = 2.0
# Limit of the cached outcomes: about 20 MiB. An outcome on 10,000 nodes has 10,000 refusals.
MAX_REFUSALS = 100_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scheduler decides about one request, and why."""

    placement: Placement | None
    refusals: tuple[Refusal, ...]
    alternatives: FittingAlternatives | None
    over: Over | None = None  # the quota that keeps it pending
    unplaced: Unplaced | None = None  # why it is pending
    position: int | None = None  # in the queue, from 1, if pending
    forecast: Forecast | None = None  # predicted start, from declared durations
    ahead: tuple[Ahead, ...] = ()  # the first instances ahead of it in the queue
    max_duration_now_s: int | None = None  # with this duration or less it would start now
    snapshot: Snapshot | None = None  # what this was computed from


class Evaluation:
    """One snapshot, and the results computed from it so far. Not thread-safe.

    Args:
        cache: shared with other evaluations.
        forecast_cache: no other evaluation uses it while this evaluation is in use.
    """

    def __init__(self, snapshot: Snapshot, cache: CycleCache, forecast_cache: CycleCache) -> None:
        self.snapshot = snapshot
        self._cache = cache
        self._forecast_cache = forecast_cache
        self._outcomes: LRUCache[str, Outcome] = LRUCache(MAX_REFUSALS, getsizeof=_size)

    def is_valid_for(self, snapshot: Snapshot) -> bool:
        """Whether the results hold for `snapshot` too, since nothing that they depend on has changed."""
        own = self.snapshot
        return (
            snapshot.nodes is own.nodes
            and snapshot.requests == own.requests
            and snapshot.quotas == own.quotas
            and snapshot.with_slots == own.with_slots
            and snapshot.potential is own.potential
            and _without_usage(snapshot.projects) == _without_usage(own.projects)
            and abs(snapshot.now - own.now) < MAX_AGE_S
        )

    @cached_property
    def requests(self) -> Mapping[str, Request]:
        """The pending requests by instance id."""
        return {request.instance_id: request for request in self.snapshot.requests}

    @cached_property
    def line(self) -> QueueOrder:
        return forecasts.queue_order(self.snapshot, self._cache)

    def order_queue(self) -> None:
        """Compute `line` now."""
        _ = self.line.units

    @cached_property
    def shares(self) -> ProjectShares:
        self._cache.update(self.snapshot.nodes)
        return ProjectShares(self.snapshot, self._cache.cluster.held, self._cache.cluster.total)

    @cached_property
    def waiting(self) -> frozenset[str]:
        """Projects with pending instances."""
        return frozenset(request.project_id for request in self.snapshot.requests)

    @cached_property
    def holders(self) -> frozenset[str]:
        """Projects with allocations."""
        self._cache.update(self.snapshot.nodes)
        return frozenset(self._cache.cluster.held)

    def outcome(self, request: Request) -> Outcome:
        """The outcome of one of the snapshot's requests."""
        if (found := self._outcomes.get(request.instance_id)) is None:
            found = self._outcomes[request.instance_id] = self._evaluate(request)
        return found

    def what_if(self, request: Request, quota: Quota | None) -> Outcome:
        """The outcome that a new request would have.

        Args:
            quota: of the project, if it has one, with the request counted.
        """
        key = repr((replace(request, queued_at=0.0), quota))
        if (found := self._outcomes.get(key)) is not None:
            return found
        own = self.snapshot
        quotas = own.quotas if quota is None else {**own.quotas, request.project_id: quota}
        changed = replace(own, requests=(*own.requests, request), quotas=quotas)
        # This evaluation computes one outcome only, so both of its caches can be the same.
        found = self._outcomes[key] = Evaluation(changed, self._cache, self._cache).outcome(request)
        return found

    @cached_property
    def _plan(self) -> SchedulingPlan:
        return schedule(self.snapshot, self._cache)

    @cached_property
    def _placements(self) -> Mapping[str, Placement]:
        return {each.instance_id: each for each in self._plan.placements}

    @cached_property
    def _forecasts(self) -> forecasts.Forecasts:
        return forecasts.Forecasts(self.snapshot, self._forecast_cache)

    def _evaluate(self, request: Request) -> Outcome:
        snapshot, instance_id = self.snapshot, request.instance_id
        request = replace(request, quota=snapshot.quotas.get(request.project_id))
        placed, unplaced = self._placements.get(instance_id), self._plan.why(instance_id)
        nodes = [node for node in snapshot.nodes if placed is None or node.id != placed.node_id]
        refused = refusals_of(nodes, request, snapshot.at)
        if placed is not None:
            return Outcome(placed, refused, None)
        return Outcome(
            None,
            refused,
            would_fit(snapshot.nodes, as_alternative(request), snapshot.at, self._cache),
            over=unplaced.over if unplaced else None,
            unplaced=unplaced,
            position=self.line.position(instance_id),
            ahead=self.line.ahead(instance_id),
            max_duration_now_s=forecasts.max_duration_now(snapshot, instance_id, self._cache),
            # Last, because a forecast changes the forecast cache, and both caches may be the same.
            forecast=self._forecasts.of(instance_id),
            snapshot=snapshot,
        )


def _size(outcome: Outcome) -> int:
    return min(1 + len(outcome.refusals), MAX_REFUSALS)


def as_alternative(request: Request) -> Request:
    """The request as an alternative to itself: the quota no longer counts the original."""
    return replace(request, quota=rules.without(request.quota, request)) if request.quota else request


def _without_usage(projects: Mapping[str, ProjectView]) -> Mapping[str, ProjectView]:
    """The projects without their usage, which decays all the time."""
    return {project_id: replace(each, used=ResourceUsage()) for project_id, each in projects.items()}
