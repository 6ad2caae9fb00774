"""I1, I4, I5 and I9: containers as their engines describe them, and the allocations of their GPUs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from mooring.db.tables import Allocation

Use = tuple[str, str]  # a GPU or MIG device, and the instance that uses it


@dataclass(frozen=True, slots=True)
class Container:
    """A container with Mooring's labels.

    Attributes:
        instance: the id in its label; "" without the label.
        gpus: the UUIDs of its GPUs and MIG devices.
        has_share: whether other containers may use its GPU too.
    """

    node: str
    id: str
    name: str
    instance: str
    attempt: int
    is_running: bool
    gpus: tuple[str, ...] = ()
    has_share: bool = False


def violations(containers: Iterable[Container]) -> Iterator[str]:
    """I1 and I4: a GPU is in one running container, and so is an instance."""
    users: dict[str, list[Container]] = defaultdict(list)
    running: dict[str, list[str]] = defaultdict(list)
    for container in containers:
        if not container.is_running:
            continue
        for uuid in container.gpus:
            users[uuid].append(container)
        if container.instance:
            running[container.instance].append(f"{container.name} on {container.node}")
    for uuid, sharing in users.items():
        if len(sharing) > 1 and not all(one.has_share for one in sharing):
            yield f"I1: {uuid} is in several running containers: {sorted(one.name for one in sharing)}"
    for instance, names in running.items():
        if len(names) > 1:
            yield f"I4: {instance} has several running containers: {sorted(names)}"


def uses(session: Session, ended_since: datetime | None = None) -> set[Use]:
    """What is allocated now, or was until after `ended_since`."""
    query = select(Allocation.gpu_uuid, Allocation.mig_uuid, Allocation.instance_id)
    is_live: ColumnElement[bool] = Allocation.to_at.is_(None)
    if ended_since is not None:
        is_live = or_(is_live, Allocation.to_at >= ended_since)
    rows = session.execute(query.where(is_live))
    return {(mig_uuid or gpu_uuid, instance) for gpu_uuid, mig_uuid, instance in rows}


def unallocated(containers: Sequence[Container], allocated: set[Use]) -> Iterator[str]:
    """I5 and I9: a running container's GPUs are allocated to its instance.

    Perhaps to a later attempt: a restart allocates them to it while the last container still ends.

    Args:
        allocated: from `uses`. If containers start and end meanwhile, what was allocated at any time since
            before they were listed.
    """
    for container in containers:
        if not container.is_running or not container.instance:
            continue
        for uuid in container.gpus:
            if (uuid, container.instance) not in allocated:
                yield f"I5: {container.name} runs on {container.node}, and {uuid} is not allocated to it"
