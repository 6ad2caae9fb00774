"""Learns the mix of requests from the queues of successive scheduling cycles.

The result goes into each snapshot, so that a scheduling cycle depends on its snapshot only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Request, Snapshot
from mooring.scheduler.packing.demand import Demand
from mooring.scheduler.packing.search import fleet_shape_of

_ID = attrgetter("instance_id")


class Learning:
    """Not thread-safe: only one scheduling cycle may use it at a time, as with `CycleCache`."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._last: Sequence[Request] = ()
        self._counted: Mapping[str, Request] = {}  # by instance id

    def learn(self, snapshot: Snapshot, cache: CycleCache) -> Snapshot:
        """Count the new requests of the snapshot. Returns the snapshot with the resulting potential."""
        cache.update(snapshot.nodes)
        if snapshot.requests is self._last:
            return replace(snapshot, potential=self._demand.potential)
        self._last = snapshot.requests
        present = dict(zip(map(_ID, snapshot.requests), snapshot.requests, strict=True))
        new = [present[instance_id] for instance_id in present.keys() - self._counted.keys()]
        for request in sorted(new, key=lambda each: (each.queued_at, each.instance_id)):
            self._demand.add(fleet_shape_of(cache.cluster, request))
        self._counted = present
        return replace(snapshot, potential=self._demand.potential)
