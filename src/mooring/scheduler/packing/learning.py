"""Learns the mix of requests from the queues of successive scheduling cycles.

The result goes into each snapshot, so that a scheduling cycle depends on its snapshot only.
"""

from dataclasses import replace

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Snapshot
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.search import asked_of_fleet


class Learning:
    """Not thread-safe: for one scheduling cycle at a time, as `CycleCache`."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._counted: frozenset[str] = frozenset()

    def learn(self, snapshot: Snapshot, cache: CycleCache) -> Snapshot:
        """Count the new requests of the snapshot. Returns the snapshot with the resulting potential."""
        cache.update(snapshot.nodes)
        new = [each for each in snapshot.requests if each.instance_id not in self._counted]
        for request in sorted(new, key=lambda each: (each.queued_at, each.instance_id)):
            self._demand.offer(asked_of_fleet(cache.cluster, request))
        self._counted = frozenset(each.instance_id for each in snapshot.requests)
        return replace(snapshot, potential=self._demand.potential)
