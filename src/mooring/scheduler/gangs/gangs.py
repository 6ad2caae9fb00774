"""Members of a gang are placed all together, as near to one another as can be.

Sets of nodes are tried from the tightest: one node, one fabric, one zone, one swarm, any. An overlay network
needs one node or one swarm. What already runs of the gang draws the others to itself.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import numpy as np

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.cluster import ClusterState, Mask
from mooring.scheduler.feasibility import quotas
from mooring.scheduler.feasibility.needs import fixed, gpu_milli
from mooring.scheduler.model import NodeView, Over, PlanTime, Quota, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing import search
from mooring.scheduler.packing.search import Allowed, Found, Key, find
from mooring.scheduler.units import Unit

# Sets of one kind that are tried: the first has room, or the ones with the most room do not.
_MAX_SETS = 16
Domain = Callable[[NodeView], Hashable]
Allowing = Callable[[Request], Allowed | None]


def whole(cluster: ClusterState, unit: Unit) -> bool:
    """Whether all members of the gang are there: those that wait, and those that hold something."""
    return unit.gang is None or len(unit.members) + held(cluster, unit) >= unit.gang.size


def held(cluster: ClusterState, unit: Unit) -> int:
    return sum(cluster.groups.get(unit.gang.group_id, {}).values()) if unit.gang else 0


def key(cluster: ClusterState, unit: Unit) -> Key:
    """As `search.key`, of a unit; whoever joins members that run already is like nobody else."""
    if unit.gang is None:
        return search.key(unit.first)
    joins = unit.gang.group_id if _homes(cluster, unit) else ""
    return (*(search.key(member) for member in sorted(unit.members, key=_size)), unit.gang.network, joins)


def place(cluster: ClusterState, unit: Unit, at: PlanTime, allowing: Allowing) -> list[Found] | None:
    """Give all members their places, which are taken then; None, and nothing is taken, if one has none."""
    if unit.gang is None:
        return _together(cluster, list(unit.members), at, None, allowing)
    members = sorted(unit.members, key=_size)
    for among in (*_single_nodes(cluster, unit, at), *sets(cluster, unit)):
        if found := _together(cluster, members, at, among, allowing):
            return found
    return None


def _size(request: Request) -> tuple[int, int, int, str]:
    """The largest first: they have the fewest nodes to choose from."""
    return (
        -gpu_milli(request),
        -(request.cpu_milli or 0),
        -(request.memory_mib or 0),
        request.instance_id,
    )


def _together(
    cluster: ClusterState, members: list[Request], at: PlanTime, among: Mask | None, allowing: Allowing
) -> list[Found] | None:
    """Each is taken before the next is looked for; all are given back if one finds nothing."""
    placed: list[Found] = []
    quota = members[0].quota
    with cluster.what_if() as what_if:
        for member in members:
            request = member if member.quota is quota else replace(member, quota=quota)
            found = find(cluster, request, at, among, allowing(request))
            if found is None:
                return None
            cluster.put(with_placement(cluster.node(found.index), found.placement, request, at))
            quota = counted(quota, request, found)
            placed.append(found)
        what_if.apply()
    return placed


def over_quota(unit: Unit) -> Over | None:
    """The limit that keeps the unit from every node: what each member takes wherever it is, added up."""
    quota = unit.first.quota
    for member in unit.members:
        if quota is None or (over := quotas.over_anywhere(replace(member, quota=quota))):
            return None if quota is None else over
        cpu_milli, memory_mib = fixed(member)
        quota = quotas.after(quota, member, "", cpu_milli or 0, memory_mib or 0)
    return None


def counted(quota: Quota | None, request: Request, found: Found) -> Quota | None:
    """The quota once this is placed."""
    if quota is None:
        return None
    placed = found.placement
    return quotas.after(quota, request, found.model, placed.cpu_milli, placed.memory_mib)


# ---- sets of nodes, from the tightest


def sets(cluster: ClusterState, unit: Unit) -> Iterator[Mask | None]:
    """Masks to try in turn, of more than one node. Others join the members that run already if they can."""
    homes = _homes(cluster, unit)
    overlay = unit.gang is not None and unit.gang.network == "overlay"
    for domain in _WITHIN_SWARMS if overlay else _DOMAINS:
        yield from _of_domain(cluster, unit, domain, homes)
    if not overlay:
        yield None


def _homes(cluster: ClusterState, unit: Unit) -> list[int]:
    return sorted(cluster.groups.get(unit.gang.group_id, ())) if unit.gang else []


def _single_nodes(cluster: ClusterState, unit: Unit, at: PlanTime) -> Iterator[Mask]:
    """The nodes where all would fit if they were one, as far as one request can say it."""
    if homes := _homes(cluster, unit):
        candidates = homes if len(homes) == 1 else []
    elif (sum_of_all := _as_one(unit)) is not None:
        found = find(cluster, sum_of_all, at)
        candidates = [found.index] if found else []
    else:
        largest = min(unit.members, key=_size)
        candidates = search.best_nodes(cluster, largest, _MAX_SETS)
    for index in candidates:
        mask = np.zeros(len(cluster), np.bool_)
        mask[index] = True
        yield mask


def _as_one(unit: Unit) -> Request | None:
    """One request for what all members ask for; None where that cannot be said."""
    first = unit.first
    shapes = {
        search.shape(replace(member, gpu_count=0, cpu_milli=0, memory_mib=0, disk_mib=0))
        for member in unit.members
    }
    if len(shapes) > 1 or first.gpu_milli < WHOLE_MILLI or first.same_numa:
        return None
    taken = [fixed(member) for member in unit.members]
    cpus = [cpu_milli for cpu_milli, _ in taken if cpu_milli is not None]
    memory = [memory_mib for _, memory_mib in taken if memory_mib is not None]
    disk = [member.disk_mib for member in unit.members if member.disk_mib is not None]
    if any(len(given) not in {0, len(taken)} for given in (cpus, memory, disk)):
        return None
    return replace(
        first,
        gpu_count=sum(member.gpu_count for member in unit.members),
        cpu_milli=sum(cpus) if cpus else None,
        memory_mib=sum(memory) if memory else None,
        disk_mib=sum(disk) if disk else None,
        stands_for=len(taken),
        quota=None,
    )


def _fabric(node: NodeView) -> Hashable:
    return node.labels.get("fabric")


def _zone(node: NodeView) -> Hashable:
    return node.labels.get("zone")


def swarm(node: NodeView) -> Hashable:
    return node.swarm


def _within_swarm(domain: Domain) -> Domain:
    def both(node: NodeView) -> Hashable:
        value = domain(node)
        return None if value is None or node.swarm is None else (value, node.swarm)

    return both


_DOMAINS: tuple[Domain, ...] = (_fabric, _zone, swarm)
_WITHIN_SWARMS = tuple(map(_within_swarm, _DOMAINS))


def _of_domain(cluster: ClusterState, unit: Unit, domain: Domain, homes: list[int]) -> Iterator[Mask]:
    """The sets with enough free cards: the one with the fewest first, which leaves the others whole."""
    of_node, values = cluster.groups_by(domain)
    of_each = cluster.numbers(_free, _free)
    if (admitting := search.admitting(cluster, unit.first)) is not None:
        of_each = np.where(admitting, of_each, 0)
    free = np.bincount(of_node, weights=of_each, minlength=len(values))
    # Where members run in several of these sets, no such set can hold all.
    of_homes = set(of_node[homes].tolist())
    enough = [
        number
        for number in np.unique(of_node[of_node > 0]).tolist()
        if free[number] >= _least(unit) and (not of_homes or of_homes == {number})
    ]
    for number in sorted(enough, key=lambda number: (free[number], str(values[number])))[:_MAX_SETS]:
        yield of_node == number


def _free(node: NodeView) -> int:
    """Thousandths of healthy cards."""
    return sum(gpu.milli_free for gpu in node.gpus if gpu.healthy)


def _least(unit: Unit) -> int:
    """MIG devices are not counted on their cards."""
    return 0 if unit.first.mig_profile is not None else unit.gpu_milli
