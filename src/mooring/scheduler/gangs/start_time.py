"""The earliest time at which a whole gang can start."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from mooring.scheduler.backfill.planner import BackfillPlanner, StartTimes
from mooring.scheduler.backfill.timeline import BackfillSlot, at_time, ended_by
from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.model import NodeView, PlanTime, Request
from mooring.scheduler.packing.search import with_request
from mooring.scheduler.units import Unit
from mooring_client.schemas.spec import WHOLE_MILLI

Floats = NDArray[np.float64]
Bounds = dict[str, Floats]  # by member; values of `StartTimes.bounds`


def gang_start(
    cluster: ClusterState, start_times: StartTimes, unit: Unit, at: PlanTime, backfill: BackfillPlanner
) -> list[BackfillSlot] | None:
    """A slot for each member, all with the same start time; None if no declared ends make room for all.

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
    """The sets of nodes to spread members over: all; with an overlay, each swarm and node without one."""
    free = [(node.id, index) for index, node in cluster.present() if not backfill.slots(index)]
    nodes = [index for _id, index in sorted(free)]
    if unit.gang is None or unit.gang.network == "host":
        return [nodes]
    member_nodes = set(cluster.groups.get(unit.gang.group_id, ()))
    member_swarms = {cluster.node(index).swarm for index in member_nodes}
    swarms: dict[str, list[int]] = {}
    alone: list[list[int]] = []
    for index in nodes:
        gpu_milli = len(cluster.node(index).gpus) * WHOLE_MILLI
        if (swarm := cluster.node(index).swarm) is not None and (
            not member_swarms or member_swarms == {swarm}
        ):
            swarms.setdefault(swarm, []).append(index)
        elif swarm is None and member_nodes <= {index} and gpu_milli >= unit.gpu_milli:
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

    position = bisect_left(times, 1, key=lambda time: int(room(time) is not None))
    if position == len(times):
        return None
    slots = room(times[position])
    return (times[position], slots) if slots else None


def _room(
    cluster: ClusterState, unit: Unit, then: PlanTime, at: PlanTime, nodes: list[int], bounds: Bounds
) -> list[BackfillSlot] | None:
    """Slots at the time `then`, each member on the first node that has room; None if one has no room."""
    views: dict[int, NodeView] = {}  # nodes at that time, with the members that have a slot
    slots: list[BackfillSlot] = []
    for member in sorted(unit.members, key=lambda member: (-member.gpu_count, member.instance_id)):
        starts = bounds[member.instance_id]
        candidates = (
            (index, views.get(index) or at_time(cluster.node(index), then.now, at))
            for index in nodes
            if starts[index] <= then.now
        )
        found = _first_with_room(candidates, member, then)
        if found is None:
            return None
        index, after = found
        views[index] = after
        slots.append(BackfillSlot(member, index, then.now, ended_by(cluster.node(index), then.now, at)))
    return slots


def _first_with_room(
    nodes: Iterable[tuple[int, NodeView]], member: Request, then: PlanTime
) -> tuple[int, NodeView] | None:
    """The first node that has room, with the member on it."""
    for index, node in nodes:
        if (after := with_request(node, member, then)) is not None:
            return index, after
    return None
