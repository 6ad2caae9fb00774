"""I11 and I12: when nothing is in progress, nodes run exactly what the database says."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.nodes.nodes import state_of_row
from mooring.core.instance.state import HOLDS_GPUS
from mooring.db.tables import Allocation, Instance, InstanceVolume, Node, Volume
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.states import DesiredState, State
from tests.invariants.containers import Container

SETTLED = {State.PENDING, State.RUNNING, State.STOPPED, State.SUCCEEDED, State.FAILED, State.DELETED}


def violations(
    session: Session, containers: Sequence[Container], foreign: Collection[str] = ()
) -> Iterator[str]:
    """An operation in progress is a violation too, so call this until there is none.

    Args:
        foreign: names of containers that Mooring did not make, or does not know after a restore.
    """
    nodes = dict(session.execute(select(Node.id, Node.name)).all())
    allocated: dict[str, set[str]] = defaultdict(set)
    for each in session.scalars(select(Allocation).where(Allocation.to_at.is_(None))):
        if each.lost_node_id is not None:
            yield f"I12: {each.gpu_uuid} is still allocated to a lost attempt of {each.instance_id}"
        allocated[each.instance_id].add(each.mig_uuid or each.gpu_uuid)
    found: dict[str, list[Container]] = defaultdict(list)
    for container in containers:
        found[container.instance].append(container)
    rows = {row.id: row for row in session.scalars(select(Instance))}
    for row in rows.values():
        own = [one for one in found[row.id] if one.name not in foreign]
        yield from _instance(row, own, allocated[row.id], nodes)
    yield from _away_from_their_data(session)
    for container in containers:
        if container.instance not in rows and container.name not in foreign:
            yield f"I11: left over on {container.node}: {container.name}"


def unready_nodes(session: Session) -> Iterator[str]:
    """For a time in which the agents, engines and disks of all nodes work."""
    for row in session.scalars(select(Node).where(Node.deleted_at.is_(None))):
        if (state := state_of_row(row)) is not NodeState.READY:
            yield f"I12: node {row.name} is {state}: {row.problem}"


def _away_from_their_data(session: Session) -> Iterator[str]:
    mounts = select(Instance.name, Volume.name, Volume.node_id, Instance.node_id)
    mounts = mounts.join(InstanceVolume, InstanceVolume.instance_id == Instance.id)
    mounts = mounts.join(Volume, Volume.id == InstanceVolume.volume_id)
    placed = Volume.driver == "local", Instance.state.in_(HOLDS_GPUS), Instance.node_id != Volume.node_id
    for instance, volume, data_on, runs_on in session.execute(mounts.where(*placed)):
        yield f"I11: {instance} is on {runs_on}, and its volume {volume} on {data_on}"


def _instance(
    row: Instance, containers: Sequence[Container], gpus: set[str], nodes: dict[str, str]
) -> Iterator[str]:
    name = f"{row.name} ({row.id}, {row.state})"
    if row.state not in SETTLED:
        yield f"I12: {name} is in transition: {row.reason}"
    if row.desired_state is DesiredState.DELETED and row.deleted_at is None:
        yield f"I12: {name} is not deleted yet"
    if row.state is State.RUNNING:
        expected = [(row.container_id, row.attempt, True, gpus, nodes.get(row.node_id or ""))]
        actual = [(one.id, one.attempt, one.is_running, set(one.gpus), one.node) for one in containers]
        if actual != expected:
            yield f"I12: {name} should be {expected} and is {actual}"
        return
    if gpus:
        yield f"I12: {name} has {sorted(gpus)}"
    if any(one.is_running for one in containers):
        yield f"I12: {name} has running containers: {[one.name for one in containers]}"
    # An instance that has run keeps its last container, for its logs.
    if len(containers) > (0 if row.state in {State.PENDING, State.DELETED} else 1):
        yield f"I12: {name} has {[one.name for one in containers]}"
