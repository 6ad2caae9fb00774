"""What was asked for lately, learnt from the queues that are seen: what waste of GPUs is judged by.

It is kept beside the looks and given to each in its snapshot, so that a look depends on nothing else.
"""

from dataclasses import replace

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Snapshot
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.search import asked_of_fleet


class Learning:
    """For one look at a time, as `CycleCache`."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._known: frozenset[str] = frozenset()

    def learn(self, snapshot: Snapshot, cache: CycleCache) -> Snapshot:
        """The snapshot as it is to be decided; what is new in its queue has been learnt from."""
        cache.update(snapshot.nodes)
        new = [each for each in snapshot.requests if each.instance_id not in self._known]
        for request in sorted(new, key=lambda each: (each.queued_at, each.instance_id)):
            self._demand.offer(asked_of_fleet(cache.cluster, request))
        self._known = frozenset(each.instance_id for each in snapshot.requests)
        return replace(snapshot, potential=self._demand.potential)
