"""Place the members of a gang together, as close to each other as possible.

Domains are tried from the tightest: one node, one fabric, one zone, one swarm, any nodes. An overlay network
needs one node or one swarm. New members join the running members of the gang.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import numpy as np

from mooring.scheduler.cluster import ClusterState, Mask
from mooring.scheduler.feasibility import masks, quotas
from mooring.scheduler.feasibility.needs import fixed, gpu_milli
from mooring.scheduler.model import NodeView, Over, PlanTime, Quota, Request
from mooring.scheduler.node_changes import with_placement
from mooring.scheduler.packing import search
from mooring.scheduler.packing.search import Allowed, Found, Key, find
from mooring.scheduler.units import Unit
from mooring_client.schemas.spec import WHOLE_MILLI

# The most sets of nodes to try per kind of domain, and the most single nodes.
_MAX_SETS = 16
Domain = Callable[[NodeView], Hashable]
Allowing = Callable[[Request], Allowed | None]


def is_complete(cluster: ClusterState, unit: Unit) -> bool:
    """Whether all members of the gang exist, pending or placed."""
    return unit.gang is None or len(unit.members) + placed_members(cluster, unit) >= unit.gang.size


def placed_members(cluster: ClusterState, unit: Unit) -> int:
    """The number of members of the gang that are placed."""
    return sum(cluster.groups.get(unit.gang.group_id, {}).values()) if unit.gang else 0


def key(cluster: ClusterState, unit: Unit) -> Key:
    """Equal for units that fit the same nodes, as `search.key`. Gangs with placed members have their own."""
    if unit.gang is None:
        return search.key(unit.first)
    joined = unit.gang.group_id if _member_nodes(cluster, unit) else ""
    return (*(search.key(member) for member in sorted(unit.members, key=_size)), unit.gang.network, joined)


def place(cluster: ClusterState, unit: Unit, at: PlanTime, allowing: Allowing) -> list[Found] | None:
    """Place all members and update the cluster state; None, with the state unchanged, if one does not fit."""
    if unit.gang is None:
        return _place_members(cluster, list(unit.members), at, None, allowing)
    members = sorted(unit.members, key=_size)
    for among in (*_single_nodes(cluster, unit, at), *sets(cluster, unit)):
        if found := _place_members(cluster, members, at, among, allowing):
            return found
    return None


def _size(request: Request) -> tuple[int, int, int, str]:
    """Sort key, largest first: large members fit on the fewest nodes."""
    return (-gpu_milli(request), -(request.cpu_milli or 0), -(request.memory_mib or 0), request.instance_id)


def _place_members(
    cluster: ClusterState, members: list[Request], at: PlanTime, among: Mask | None, allowing: Allowing
) -> list[Found] | None:
    """Place the members in turn; all placements are undone if one does not fit."""
    placed: list[Found] = []
    quota = members[0].quota
    with cluster.what_if() as what_if:
        for member in members:
            request = member if member.quota is quota else replace(member, quota=quota)
            found = find(cluster, request, at, among, allowing(request))
            if found is None:
                return None
            cluster.put(with_placement(cluster.node(found.index), found.placement, request, at))
            quota = quota_after(quota, request, found)
            placed.append(found)
        what_if.apply()
    return placed


def over_quota(unit: Unit) -> Over | None:
    """The quota that the members together exceed on every node."""
    quota = unit.first.quota
    if quota is None:
        return None
    for member in unit.members:
        if over := quotas.over_anywhere(replace(member, quota=quota)):
            return over
        cpu_milli, memory_mib = fixed(member)
        quota = quotas.after(quota, member, "", cpu_milli or 0, memory_mib or 0)
    return None


def quota_after(quota: Quota | None, request: Request, found: Found) -> Quota | None:
    """The quota after this placement."""
    if quota is None:
        return None
    placed = found.placement
    return quotas.after(quota, request, found.model, placed.cpu_milli, placed.memory_mib)


def sets(cluster: ClusterState, unit: Unit) -> Iterator[Mask | None]:
    """Masks of several nodes (None: all), tightest first. Each includes the nodes of all placed members."""
    member_nodes = _member_nodes(cluster, unit)
    overlay = unit.gang is not None and unit.gang.network == "overlay"
    for domain in _WITHIN_SWARMS if overlay else _DOMAINS:
        yield from _of_domain(cluster, unit, domain, member_nodes)
    if not overlay:
        yield None


def _member_nodes(cluster: ClusterState, unit: Unit) -> list[int]:
    return sorted(cluster.groups.get(unit.gang.group_id, ())) if unit.gang else []


def _single_nodes(cluster: ClusterState, unit: Unit, at: PlanTime) -> Iterator[Mask]:
    """Masks of one node: that of placed members, or else nodes with room for the sum or the largest one."""
    if member_nodes := _member_nodes(cluster, unit):
        candidates = member_nodes if len(member_nodes) == 1 else []
    elif (combined := _combined_request(unit)) is not None:
        found = find(cluster, combined, at)
        candidates = [found.index] if found else []
    else:
        largest = min(unit.members, key=_size)
        candidates = search.best_nodes(cluster, largest, _MAX_SETS)
    for index in candidates:
        mask = np.zeros(len(cluster), np.bool_)
        mask[index] = True
        yield mask


def _combined_request(unit: Unit) -> Request | None:
    """One request for the sum of all members; None if their requests cannot be combined."""
    first = unit.first
    shapes = {
        search.shape(replace(member, gpu_count=0, cpu_milli=0, memory_mib=0, disk_mib=0))
        for member in unit.members
    }
    if len(shapes) > 1 or first.gpu_milli < WHOLE_MILLI or first.same_numa:
        return None
    needed = [fixed(member) for member in unit.members]
    cpus = [cpu_milli for cpu_milli, _ in needed if cpu_milli is not None]
    memory = [memory_mib for _, memory_mib in needed if memory_mib is not None]
    disk = [member.disk_mib for member in unit.members if member.disk_mib is not None]
    # Each amount must be set for all members or for none.
    if any(len(amounts) not in {0, len(needed)} for amounts in (cpus, memory, disk)):
        return None
    return replace(
        first,
        gpu_count=sum(member.gpu_count for member in unit.members),
        cpu_milli=sum(cpus) if cpus else None,
        memory_mib=sum(memory) if memory else None,
        disk_mib=sum(disk) if disk else None,
        stands_for=len(needed),
        quota=None,
    )


def _label(name: str) -> Domain:
    return lambda node: node.labels.get(name)


def swarm(node: NodeView) -> Hashable:
    return node.swarm


def _within_swarm(domain: Domain) -> Domain:
    def domain_and_swarm(node: NodeView) -> Hashable:
        value = domain(node)
        return None if value is None or node.swarm is None else (value, node.swarm)

    return domain_and_swarm


_DOMAINS: tuple[Domain, ...] = (_label("fabric"), _label("zone"), swarm)
_WITHIN_SWARMS = tuple(map(_within_swarm, _DOMAINS))


def _of_domain(cluster: ClusterState, unit: Unit, domain: Domain, member_nodes: list[int]) -> Iterator[Mask]:
    """The sets with enough free GPUs, the one with the fewest first, to keep larger ones free."""
    of_node, values = cluster.groups_by(domain)
    per_node = cluster.numbers(_free_milli, _free_milli)
    if (admitting := masks.passing(cluster, unit.first, permanent=True)) is not None:
        per_node = np.where(admitting, per_node, 0)
    free = np.bincount(of_node, weights=per_node, minlength=len(values))
    # If members run in several of these sets, no set has all of them.
    member_sets = set(of_node[member_nodes].tolist())
    enough = [
        number
        for number in np.unique(of_node[of_node > 0]).tolist()
        if free[number] >= _min_free_milli(unit) and (not member_sets or member_sets == {number})
    ]
    for number in sorted(enough, key=lambda number: (free[number], str(values[number])))[:_MAX_SETS]:
        yield of_node == number


def _free_milli(node: NodeView) -> int:
    """Free thousandths of healthy GPUs."""
    return sum(gpu.milli_free for gpu in node.gpus if gpu.healthy)


def _min_free_milli(unit: Unit) -> int:
    """The free thousandths that a set must have; 0 for MIG devices, which `_free_milli` does not count."""
    return 0 if unit.first.mig_profile is not None else unit.gpu_milli
