"""Ways to keep the queue: the production scheduler's, and others'. Where a task goes is chosen alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.month_simulation import Cluster, Decide
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Placement, Policy, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing.learning import Learning
from mooring.scheduler.packing.search import Key, find, shape
from mooring.scheduler.schedule import SchedulingCycle


def production() -> Decide:
    memory, learning = CycleCache(), Learning()
    promised: frozenset[str] = frozenset()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        nonlocal promised
        snapshot = learning.learn(replace(cluster.snapshot(waiting), promised=promised), memory)
        plan = SchedulingCycle(snapshot, memory).decisions()
        promised = frozenset(plan.promised)
        return plan.placements

    return decide


def fifo() -> Decide:
    """Strictly in the order of arrival: who does not fit holds up everybody behind."""
    return _one_by_one(stop_at_first=True)


def whatever_fits() -> Decide:
    """Whatever fits starts, the oldest first; nothing is kept for who does not fit."""
    return _one_by_one(stop_at_first=False)


def _one_by_one(*, stop_at_first: bool) -> Decide:
    memory, learning = CycleCache(), Learning()

    def decide(cluster: Cluster, waiting: Sequence[Request]) -> Sequence[Placement]:
        snapshot = learning.learn(cluster.snapshot(waiting), memory)
        world = memory.cluster
        world.set_potential(snapshot.potential)
        placements: list[Placement] = []
        failed: set[Key] = set()
        with world.what_if():
            for request in waiting:
                # Shares of one card are of one project: whether something fits depends on whose it is.
                asked = (*shape(request), request.project_id)
                found = None if asked in failed else find(world, request, snapshot.at)
                if found is not None:
                    world.put(with_placement(world.node(found.index), found.placement, request, snapshot.at))
                    placements.append(found.placement)
                    continue
                failed.add(asked)
                if stop_at_first:
                    break
        return placements

    return decide


@dataclass(frozen=True, slots=True)
class Contender:
    decide: Callable[[], Decide]
    policy: Policy


# FIFO with EASY is the production scheduler where everybody is overdue at once: oldest first, whoever it is.
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "Mooring": Contender(production, Policy()),
        "Mooring, conservative": Contender(production, Policy(backfill="conservative")),
        "FIFO + EASY": Contender(production, Policy(overdue_after_s=-1)),
        "FIFO": Contender(fifo, Policy()),
        "best fit": Contender(whatever_fits, Policy()),
    }
)
