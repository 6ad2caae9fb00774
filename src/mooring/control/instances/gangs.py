"""Instance groups as the scheduler and nodes see them: gangs, networks and the membership of instances."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.core.group import member_name, overlay_name
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Instance, InstanceGroup, Node, Project
from mooring.scheduler.model import Gang
from mooring.schemas.agent import HOSTFILE, GroupMembership, OverlayNetwork
from mooring_client.schemas.instance_groups import UsedNetwork
from mooring_client.schemas.states import State


def of(session: Session, group_ids: Collection[str]) -> dict[str, Gang]:
    """The gangs of those groups that may be placed now.

    A group with a member that is still stopping or preempted waits until all members are pending.
    """
    if not group_ids:
        return {}
    leaving = select(Instance.group_id).where(
        Instance.group_id.in_(group_ids),
        (Instance.state == State.STOPPING) | Instance.requeue,
        Instance.deleted_at.is_(None),
    )
    columns = (InstanceGroup.id, InstanceGroup.count, InstanceGroup.network, Project.host_network)
    query = (
        select(*columns)
        .join(Project, Project.id == InstanceGroup.project_id)
        .where(InstanceGroup.id.in_(group_ids), InstanceGroup.id.not_in(leaving))
    )
    return {
        group_id: Gang(group_id, count, "host" if host_network and network != "overlay" else "overlay")
        for group_id, count, network, host_network in session.execute(query)
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """How the members of a group reach each other on their present nodes."""

    group: InstanceGroup
    network: UsedNetwork
    swarm: str | None  # the swarm of the overlay network; None without one
    hosts: tuple[str, ...]  # by rank: where each member is reached

    @property
    def processes(self) -> int:
        """How many processes a launcher starts in each member: one for each GPU."""
        return max(1, int((self.group.template.get("gpus") or {}).get("count", 0)))


def layouts(session: Session, group_ids: Collection[str]) -> dict[str, Layout]:
    """The layouts of those groups that have a placed member, by group id."""
    if not group_ids:
        return {}
    groups = session.scalars(select(InstanceGroup).where(InstanceGroup.id.in_(group_ids))).all()
    node_ids = _member_nodes(session, group_ids)
    facts = _network_facts(session, {each for by_rank in node_ids.values() for each in by_rank.values()})
    may_use_host = _may_use_host(session, {group.project_id for group in groups})
    return {
        group.id: _layout(group, node_ids[group.id], facts, host=group.project_id in may_use_host)
        for group in groups
        if group.id in node_ids
    }


def _member_nodes(session: Session, group_ids: Collection[str]) -> dict[str, dict[int, str]]:
    """Group id -> rank -> node id, of members that are placed or have ended on a node."""
    query = select(Instance.group_id, Instance.group_rank, Instance.node_id).where(
        Instance.group_id.in_(group_ids), Instance.node_id.is_not(None), Instance.deleted_at.is_(None)
    )
    node_ids: dict[str, dict[int, str]] = defaultdict(dict)
    for group_id, rank, node_id in session.execute(query):
        if group_id is not None and rank is not None and node_id is not None:
            node_ids[group_id][rank] = node_id
    return node_ids


@dataclass(frozen=True, slots=True)
class _NetworkFacts:
    swarm: str | None
    address: str


def _network_facts(session: Session, node_ids: Collection[str]) -> dict[str, _NetworkFacts]:
    query = select(Node.id, Node.facts).where(Node.id.in_(node_ids))
    return {
        node_id: _NetworkFacts((facts.get("swarm") or {}).get("cluster_id"), facts["address"])
        for node_id, facts in session.execute(query)
        if facts
    }


def _may_use_host(session: Session, project_ids: Iterable[str]) -> set[str]:
    query = select(Project.id).where(Project.id.in_(set(project_ids)), Project.host_network.is_(True))
    return set(session.scalars(query))


def _layout(
    group: InstanceGroup, node_ids: Mapping[int, str], facts: Mapping[str, _NetworkFacts], *, host: bool
) -> Layout:
    swarms = {facts[node_id].swarm for node_id in node_ids.values() if node_id in facts}
    # A restarted member may be placed on another node, so the network must span nodes from the start.
    spreads = len(set(node_ids.values())) > 1 or group.on_member_failure == "restart_member"
    network: UsedNetwork = "bridge"
    if host and group.network == "host":
        network = "host"
    elif spreads and len(swarms) == 1 and None not in swarms:
        network = "overlay"
    elif spreads and host and group.network != "overlay":
        network = "host"
    hosts = [member_name(group.name, rank) for rank in range(group.count)]
    if network == "host":
        # Names are of the group's own network.
        hosts = [
            facts[node_ids[rank]].address if node_ids.get(rank) in facts else name
            for rank, name in enumerate(hosts)
        ]
    return Layout(group, network, swarms.pop() if network == "overlay" else None, tuple(hosts))


def memberships(session: Session, rows: Sequence[Instance]) -> dict[str, GroupMembership]:
    """The group membership of each instance for its assignment, by instance id."""
    found = layouts(session, {row.group_id for row in rows if row.group_id})
    return {
        row.id: _membership(found[row.group_id], row.group_rank or 0)
        for row in rows
        if row.group_id and row.group_id in found
    }


def _membership(layout: Layout, rank: int) -> GroupMembership:
    group = layout.group
    return GroupMembership(
        group_id=group.id,
        rank=rank,
        count=group.count,
        hostname=member_name(group.name, rank),
        network=layout.network,
        overlay_name=overlay_name(group.id) if layout.network == "overlay" else None,
        hostfile="".join(f"{host} slots={layout.processes}\n" for host in layout.hosts),
        env={
            **_launcher_env(layout, rank),
            "MASTER_ADDR": layout.hosts[0],
            "MASTER_PORT": str(group.master_port),
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "WORLD_SIZE": str(group.count),
            "MOORING_GROUP_ID": group.id,
            "MOORING_GROUP_NAME": group.name,
            "MOORING_GROUP_RANK": str(rank),
            "MOORING_GROUP_SIZE": str(group.count),
        },
    )


def _launcher_env(layout: Layout, rank: int) -> dict[str, str]:
    """What launchers read besides the variables that torch itself reads. The user's `env` comes before them.

    `PET_…` are the defaults of torchrun's options (`torch.distributed.argparse_util`). NNODES and
    NPROC_PER_NODE are for options of other launchers. The hostfile is for MPI, in the variables of Open MPI 4
    and 5; DeepSpeed reads /job/hostfile by itself.
    """
    nodes, processes = str(layout.group.count), str(layout.processes)
    found = {
        "NNODES": nodes,
        "NPROC_PER_NODE": processes,
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": processes,
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": layout.hosts[0],
        "PET_MASTER_PORT": str(layout.group.master_port),
        "OMPI_MCA_orte_default_hostfile": HOSTFILE,
        "PRTE_MCA_prte_default_hostfile": HOSTFILE,
        "MOORING_GROUP_HOSTS": ",".join(layout.hosts),
    }
    users = layout.group.template.get("env") or {}
    return {name: value for name, value in found.items() if name not in users}


def overlays(session: Session) -> dict[str, list[OverlayNetwork]]:
    """Swarm -> the networks that should exist in it: those of the groups with placed members."""
    query = select(Instance.group_id).where(
        Instance.group_id.is_not(None), Instance.state.in_(HOLDS_GPUS), Instance.deleted_at.is_(None)
    )
    found: dict[str, list[OverlayNetwork]] = defaultdict(list)
    for layout in layouts(session, set(session.scalars(query.distinct()))).values():
        if layout.swarm is not None:
            found[layout.swarm].append(_overlay(layout.group))
    return {swarm: sorted(networks, key=lambda each: each.name) for swarm, networks in found.items()}


def _overlay(group: InstanceGroup) -> OverlayNetwork:
    return OverlayNetwork(
        name=overlay_name(group.id),
        group_id=group.id,
        project_id=group.project_id,
        encrypted=group.encrypted,
    )


def overlays_of(session: Session, node: Node) -> list[OverlayNetwork]:
    """The networks that this node should create, if it is a manager of its swarm."""
    swarm = (node.facts or {}).get("swarm")
    return overlays(session).get(swarm["cluster_id"], []) if swarm and swarm["manager"] else []


def notify_managers(session: Session, swarms: Collection[str]) -> None:
    """Make the waiting calls of these swarms' managers return with the networks that should exist."""
    query = select(Node.id, Node.facts).where(Node.deleted_at.is_(None), Node.facts.is_not(None))
    found = ((node_id, (facts or {}).get("swarm")) for node_id, facts in session.execute(query))
    managers = [key for key, swarm in found if swarm and swarm["manager"] and swarm["cluster_id"] in swarms]
    for node in locks.nodes(session, managers).values():
        node.generation += 1
        notify(session, Topic.node(node.id))
