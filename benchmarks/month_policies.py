"""Queue policies: that of the production scheduler, and others. All select nodes in the same way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.month_simulation import Cluster, Decide
from mooring.core.policy import Policy
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Placement, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing.learning import Learning
from mooring.scheduler.packing.search import Key, find, shape
from mooring.scheduler.schedule import SchedulingCycle


def production() -> Decide:
    cache, learning = CycleCache(), Learning()
    with_slots: frozenset[str] = frozenset()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        nonlocal with_slots
        snapshot = learning.learn(replace(cluster.snapshot(waiting), with_slots=with_slots), cache)
        plan = SchedulingCycle(snapshot, cache).decisions()
        with_slots = frozenset(plan.with_slots)
        return plan.placements

    return decide


def fifo() -> Decide:
    """Strict order of arrival: a task that does not fit blocks all later ones."""
    return _one_by_one(stop_at_first=True)


def anything_that_fits() -> Decide:
    """Starts every task that fits, the oldest first, without backfill slots."""
    return _one_by_one(stop_at_first=False)


def _one_by_one(*, stop_at_first: bool) -> Decide:
    cache, learning = CycleCache(), Learning()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        snapshot = learning.learn(cluster.snapshot(waiting), cache)
        state = cache.cluster
        state.set_potential(snapshot.potential)
        placements: list[Placement] = []
        failed: set[Key] = set()
        with state.what_if():
            for request in waiting:
                # All shares of a GPU belong to one project, so the project decides whether a request fits.
                cache_key = (*shape(request), request.project_id)
                found = None if cache_key in failed else find(state, request, snapshot.at)
                if found is not None:
                    state.put(with_placement(state.node(found.index), found.placement, request, snapshot.at))
                    placements.append(found.placement)
                    continue
                failed.add(cache_key)
                if stop_at_first:
                    break
        return placements

    return decide


@dataclass(frozen=True, slots=True)
class Contender:
    decide: Callable[[], Decide]
    policy: Policy


# FIFO with EASY is the production scheduler with all tasks overdue at once: the oldest first.
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "Mooring": Contender(production, Policy()),
        "Mooring, conservative": Contender(production, Policy(backfill="conservative")),
        "FIFO + EASY": Contender(production, Policy.model_construct(overdue_after_s=-1)),
        "FIFO": Contender(fifo, Policy()),
        "best fit": Contender(anything_that_fits, Policy()),
    }
)
