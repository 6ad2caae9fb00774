"""Learns the mix of requests from the queues of successive scheduling cycles.

The result goes into each snapshot, so that a scheduling cycle depends on its snapshot only.
"""

from collections.abc import Sequence
from dataclasses import replace

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.differences import differences
from mooring.scheduler.model import Request, Snapshot
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.search import fleet_shape_of


class Learning:
    """Not thread-safe: only one scheduling cycle may use it at a time, as with `CycleCache`."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._last: Sequence[Request] = ()

    def learn(self, snapshot: Snapshot, cache: CycleCache) -> Snapshot:
        """Count the new requests of the snapshot. Returns the snapshot with the resulting potential."""
        cache.update(snapshot.nodes)
        if snapshot.requests is self._last:
            return replace(snapshot, potential=self._demand.potential)
        gone, new = differences(self._last, snapshot.requests)
        self._last = snapshot.requests
        counted = {each.instance_id for each in gone}
        for request in sorted(new, key=lambda each: (each.queued_at, each.instance_id)):
            if request.instance_id not in counted:  # else it was changed
                self._demand.add(fleet_shape_of(cache.cluster, request))
        return replace(snapshot, potential=self._demand.potential)
