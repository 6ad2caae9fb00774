"""Learns the mix of requests from the queues of successive scheduling cycles.

The result goes into each snapshot, so that a scheduling cycle depends on its snapshot only.
"""

from dataclasses import replace

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Snapshot
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.search import fleet_shape_of


class Learning:
    """Not thread-safe: only one scheduling cycle may use it at a time, as with `CycleCache`."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._counted: frozenset[str] = frozenset()

    def learn(self, snapshot: Snapshot, cache: CycleCache) -> Snapshot:
        """Count the new requests of the snapshot. Returns the snapshot with the resulting potential."""
        cache.update(snapshot.nodes)
        new = [each for each in snapshot.requests if each.instance_id not in self._counted]
        for request in sorted(new, key=lambda each: (each.queued_at, each.instance_id)):
            self._demand.add(fleet_shape_of(cache.cluster, request))
        self._counted = frozenset(each.instance_id for each in snapshot.requests)
        return replace(snapshot, potential=self._demand.potential)
