"""The earliest time at which a whole gang can start."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.backfill.planner import BackfillPlanner, StartTimes
from mooring.scheduler.backfill.timeline import BackfillSlot, at_time, in_the_way
from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.feasibility.filters import fitting_offers
from mooring.scheduler.model import NodeView, PlanTime, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing.search import placement
from mooring.scheduler.units import Unit

Floats = NDArray[np.float64]
Bounds = dict[str, Floats]  # by member; values of `StartTimes.bounds`


def gang_start(
    cluster: ClusterState, start_times: StartTimes, unit: Unit, at: PlanTime, backfill: BackfillPlanner
) -> list[BackfillSlot] | None:
    """A slot for each member, all with one start time; None if no declared ends make room for all.

    Nodes with backfill slots of other units are not used.
    """
    bounds = {member.instance_id: start_times.bounds(member, at).values for member in unit.members}
    best: tuple[float, list[BackfillSlot]] | None = None
    for nodes in _domains(cluster, unit, backfill):
        if best and min(values[nodes].min() for values in bounds.values()) >= best[0]:
            continue
        found = _earliest(cluster, unit, at, nodes, bounds)
        if found and (best is None or found[0] < best[0]):
            best = found
    return best[1] if best else None


def _domains(cluster: ClusterState, unit: Unit, backfill: BackfillPlanner) -> list[list[int]]:
    """The sets of nodes to spread members over: all nodes; with an overlay network, each swarm or node."""
    free = [(node.id, index) for index, node in cluster.present() if not backfill.slots(index)]
    nodes = [index for _id, index in sorted(free)]
    if unit.gang is None or unit.gang.network == "host":
        return [nodes]
    homes = {cluster.node(index).swarm for index in cluster.groups.get(unit.gang.group_id, ())}
    swarms: dict[str, list[int]] = {}
    alone: list[list[int]] = []
    running_on = set(cluster.groups.get(unit.gang.group_id, ()))
    for index in nodes:
        gpu_milli = len(cluster.node(index).gpus) * WHOLE_MILLI
        if (swarm := cluster.node(index).swarm) is not None and (not homes or homes == {swarm}):
            swarms.setdefault(swarm, []).append(index)
        elif swarm is None and running_on <= {index} and gpu_milli >= unit.gpu_milli:
            alone.append([index])  # one node needs no overlay network
    return [*swarms.values(), *alone]


def _earliest(
    cluster: ClusterState, unit: Unit, at: PlanTime, nodes: list[int], bounds: Bounds
) -> tuple[float, list[BackfillSlot]] | None:
    node_indexes = np.array(nodes, np.int64)
    finite_times = {float(time) for values in bounds.values() for time in values[node_indexes] if time < inf}
    times = sorted({max(time, at.now) for time in finite_times})
    if not times:
        return None

    def room(time: float) -> list[BackfillSlot] | None:
        return _room(cluster, unit, replace(at, now=time), at, nodes, bounds)

    place = bisect_left(times, 1, key=lambda time: int(room(time) is not None))
    if place == len(times):
        return None
    parts = room(times[place])
    return (times[place], parts) if parts else None


def _room(
    cluster: ClusterState, unit: Unit, then: PlanTime, at: PlanTime, nodes: list[int], bounds: Bounds
) -> list[BackfillSlot] | None:
    """Slots at that time, each member on the first node that has room."""
    views: dict[int, NodeView] = {}
    parts: list[BackfillSlot] = []
    for member in sorted(unit.members, key=lambda member: (-member.gpu_count, member.instance_id)):
        index = _first_with_room(cluster, member, then, at, nodes, bounds[member.instance_id], views)
        if index is None:
            return None
        waits_for = in_the_way(cluster.node(index), then.now, at)
        parts.append(BackfillSlot(member, index, then.now, waits_for))
    return parts


def _first_with_room(
    cluster: ClusterState,
    member: Request,
    then: PlanTime,
    at: PlanTime,
    nodes: Sequence[int],
    bounds: Floats,
    views: dict[int, NodeView],
) -> int | None:
    for index in nodes:
        if not bounds[index] <= then.now:
            continue
        node = views.get(index) or at_time(cluster.node(index), then.now, at)
        offers = fitting_offers(node, member, then)
        if offers:
            placed = placement(node, member, offers[0], then)
            views[index] = with_placement(node, placed, member, then)
            return index
    return None
