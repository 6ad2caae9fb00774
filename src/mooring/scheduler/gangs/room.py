"""The most members of a gang that the cluster could ever run at once; a larger gang can never start."""

from collections import Counter

import numpy as np

from mooring.scheduler.cluster import ClusterState, Ints
from mooring.scheduler.feasibility import filters, masks
from mooring.scheduler.gangs.gangs import swarm
from mooring.scheduler.model import Request
from mooring.scheduler.packing import search
from mooring.scheduler.packing.node_classes import NodeKind, Suitable
from mooring.scheduler.units import Unit
from mooring_client.schemas.spec import WHOLE_MILLI


def most_members(cluster: ClusterState, unit: Unit) -> int | None:
    """An upper bound for the members that can run at once in an empty cluster; None if members differ.

    With an overlay network, the members run on one node or in one swarm, otherwise on any nodes.
    """
    if unit.gang is None or len({search.shape(member) for member in unit.members}) > 1:
        return None
    per_node = _per_node(cluster, unit.first)
    if unit.gang.network == "host":
        return int(per_node.sum())
    of_swarm, _swarms = cluster.groups_by(swarm)
    per_swarm = np.bincount(of_swarm, weights=per_node)[1:]
    return int(max(per_swarm.max(initial=0), per_node.max(initial=0)))


def _per_node(cluster: ClusterState, request: Request) -> Ints:
    of_kinds = zip(cluster.kinds, cluster.suitable(request), strict=True)
    per_kind = np.array([_per_kind(kind, suitable, request) for kind, suitable in of_kinds], np.int64)
    present, admitting = masks.present(cluster), masks.passing(cluster, request, permanent=True)
    return np.where(present if admitting is None else present & admitting, per_kind[cluster.kind_of], 0)


def _per_kind(kind: NodeKind, suitable: Suitable, request: Request) -> int:
    amounts = [rule.amount for rule in filters.RULES.all if rule.amount is not None]
    limits = [
        amount.total(kind) // needed
        for amount in amounts
        if amount.total is not None and (needed := amount.needed(request, kind))
    ]
    if request.gpu_count:
        limits.append(_by_gpus(kind, suitable, request))
    return min(limits, default=0)


def _by_gpus(kind: NodeKind, suitable: Suitable, request: Request) -> int:
    models = {model for _rank, model in suitable.models}
    places = Counter(
        place.key
        for index, place in enumerate(kind.places)
        if place.key in models and index not in suitable.unsuitable
    )
    if request.mig_profile is None and request.gpu_milli < WHOLE_MILLI:
        return sum(places.values()) * (WHOLE_MILLI // request.gpu_milli)
    return sum(count // request.gpu_count for count in places.values())
