"""GPUs: the inventory that nodes report, incidents and health, and moves of a GPU to another node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.nodes import approval, gpu_health
from mooring.core.access import Access
from mooring.core.gpu import GpuFacts
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Allocation, Gpu, Node
from mooring.db.types import JsonObject
from mooring.schemas.agent import Incident
from mooring_client.errors import FactsChangedAgain, Forbidden, GpuInUse, GpuLost, NotFound
from mooring_client.schemas.gpus import Health
from mooring_client.schemas.states import Reason


@dataclass(frozen=True, slots=True)
class InventoryDifference:
    """The approved facts of a node's GPUs after a report, and the differences from them."""

    approved: dict[str, JsonObject]
    changes: list[JsonObject]


def apply_inventory(
    session: Session,
    node: Node,
    reported: Sequence[GpuFacts],
    approved: Mapping[str, JsonObject] | None,
    *,
    simulated: bool,
) -> InventoryDifference:
    """Update the node's GPUs from its report, within the approved facts.

    A GPU that the node no longer lists is lost, never deleted. A GPU of another node stays there: everybody
    can see UUIDs, so a node that lists one proves nothing.

    Args:
        approved: by UUID; null: this is the first inventory, which is approved as it is.
    """
    kept = dict(approved or {})
    changes: list[JsonObject] = []
    listed = {gpu.uuid: gpu for gpu in reported}
    known = {
        gpu.uuid: gpu
        for gpu in session.scalars(select(Gpu).where((Gpu.node_id == node.id) | Gpu.uuid.in_(list(listed))))
    }
    for uuid, facts in listed.items():
        row = known.get(uuid)
        if row is not None and row.node_id != node.id and not _may_move(session, row):
            values = approval.values_of_gpu(facts)
            changes.append(approval.change("gpu", None, values, gpu_uuid=uuid, node_id=row.node_id))
        elif approved is not None and uuid not in approved:
            changes.append(approval.change("gpu", None, approval.values_of_gpu(facts), gpu_uuid=uuid))
        elif row is not None and uuid in kept and not _differs(row, node, facts):
            _update_health(session, row, facts)  # the usual case
        else:
            compared = approval.compare_gpu(kept.get(uuid, {}), facts)
            kept[uuid] = compared.approved
            changes += compared.changes
            _store(session, node, row, GpuFacts.model_validate(compared.effective), simulated=simulated)
    for uuid in sorted(known.keys() - listed.keys()):
        missing = Reason(code="gpu_missing", message="its node no longer lists it")
        _set_health(session, known[uuid], Health.LOST, missing)
    return InventoryDifference(kept, changes)


def _store(session: Session, node: Node, row: Gpu | None, facts: GpuFacts, *, simulated: bool) -> None:
    if facts.mig_devices and (row is None or _differs(row, node, facts)):
        facts = _without_others_devices(session, facts)
    if row is None:
        row = Gpu(uuid=facts.uuid, health=Health.HEALTHY)
        session.add(row)  # only now: the query above would flush the incomplete row
    if _differs(row, node, facts):
        revisions.changed(session, node.id, row.node_id)
        row.node_id, row.index, row.model = node.id, facts.index, facts.model
        row.memory_mib, row.facts, row.simulated = facts.memory_mib, facts.model_dump(mode="json"), simulated
        gpu_health.set_standing(session, row, facts.conditions)
        notify(session, Topic.SCHEDULE)
    _update_health(session, row, facts)


def _differs(row: Gpu, node: Node, facts: GpuFacts) -> bool:
    return row.node_id != node.id or row.facts != facts.model_dump(mode="json")


def _without_others_devices(session: Session, facts: GpuFacts) -> GpuFacts:
    """Leave out MIG devices of other GPUs: such a device could no longer be allocated on its own GPU."""
    query = select(Gpu.facts).where(Gpu.uuid != facts.uuid, Gpu.facts["mig_mode"].as_string() == "enabled")
    others = {device["uuid"] for other in session.scalars(query) for device in other["mig_devices"]}
    own = [device for device in facts.mig_devices if device.uuid not in others]
    return facts.model_copy(update={"mig_devices": own})


def _may_move(session: Session, row: Gpu) -> bool:
    """Whether a GPU may move without an admin: only once its old node is deleted and nothing uses the GPU."""
    owner = session.get(Node, row.node_id)
    return (owner is None or owner.deleted_at is not None) and not is_held(session, row.uuid)


def move(session: Session, node: Node, uuid: str, owner_id: str) -> None:
    """Move a GPU of another node to this one, approved by an admin; the caller has locked both nodes.

    Raises:
        Conflict: codes `gpu_in_use`: an instance uses it; `facts_changed_again`: a third node has it.
    """
    row = session.get_one(Gpu, uuid, populate_existing=True)
    if row.node_id != owner_id:
        raise FactsChangedAgain(f"{uuid} has moved meanwhile; read the node again")
    if is_held(session, uuid):
        raise GpuInUse(f"an instance on node {row.node_id} uses {uuid}; stop it first")
    owner = session.get_one(Node, row.node_id)
    approved = dict(owner.approved or {})
    others = {key: facts for key, facts in (approved.get(approval.GPUS) or {}).items() if key != uuid}
    owner.approved = {**approved, approval.GPUS: others}
    revisions.changed(session, node.id, row.node_id)
    row.node_id = node.id


def _update_health(session: Session, row: Gpu, facts: GpuFacts) -> None:
    if facts.fault:
        code = gpu_health.code_of(facts.fault)
        health = Health.LOST if code == "gpu_lost" else Health.QUARANTINED
        # A GPU that is out of use keeps its reason, unless this fault is new.
        known = row.health is health and (
            (row.health_reason or {}).get("code") == code or gpu_health.has_condition(session, row, code)
        )
        if row.health is not Health.LOST and not known:
            _set_health(session, row, health, Reason(code=code, message=f"the driver reports {code}"))
    elif row.health is Health.LOST:
        _set_health(
            session, row, Health.QUARANTINED,
            Reason(code="gpu_returned", message="it was lost and is back; clear it once you have checked it"),
        )  # fmt: skip


def _set_health(
    session: Session,
    row: Gpu,
    health: Health,
    reason: Reason | None,
    about: Sequence[gpu_health.GpuHolder] | None = None,
) -> None:
    """Args: about: the holders whom the reason concerns; null: the present ones."""
    stored = reason.model_dump() if reason else None
    if (row.health, row.health_reason) == (health, stored):
        return
    before, row.health, row.health_reason = row.health, health, stored
    holders = gpu_health.holders_of(session, row) if about is None else about
    row.reason_project_id = gpu_health.only_project(holders) if reason else None
    gpu_health.apply_health(session, row, health, reason, holders)
    revisions.changed(session, row.node_id)
    events.append(
        session,
        EventKind.GPU_HEALTH_CHANGED,
        {
            "gpu_uuid": row.uuid,
            "node_id": row.node_id,
            "from": str(before),
            "to": str(health),
            "reason": stored,
        },
    )
    notify(session, Topic.SCHEDULE, Topic.GPU_HEALTH)


def apply_incidents(
    session: Session, node: Node, incidents: Sequence[Incident], faults: Sequence[Incident] = ()
) -> None:
    """Record incidents, and quarantine GPUs with fatal ones. A repeated report does not undo a clear.

    Both lists are treated alike: nodes of an earlier release report faults of programs as incidents.
    """
    for uuid in dict.fromkeys(each.uuid for each in (*incidents, *faults)):
        row = session.get(Gpu, uuid)
        if row is None or row.node_id != node.id:
            continue
        new = _unseen(row.last_incident_id, uuid, incidents)
        new_faults = _unseen(row.last_fault_id, uuid, faults)
        row.last_incident_id = new[-1].id if new else row.last_incident_id
        row.last_fault_id = new_faults[-1].id if new_faults else row.last_fault_id
        for incident in _merged((*new, *new_faults)):
            _apply_incident(session, row, incident)


def _merged(incidents: Sequence[Incident]) -> list[Incident]:
    """Merge equal incidents into one with a count, so that a report costs only its distinct incidents."""
    found: dict[tuple[str, str | None, tuple[str, ...]], Incident] = {}
    for each in incidents:
        kind = (each.code, each.instance_id, tuple(each.mig_uuids))
        before = found[kind].count if kind in found else 0
        found[kind] = each.model_copy(update={"count": min(before + each.count, 2**31 - 1)})
    return list(found.values())


def _apply_incident(session: Session, row: Gpu, incident: Incident) -> None:
    code = gpu_health.code_of(incident.code)
    fault = gpu_health.fault_of(row, code)
    holders = gpu_health.holders_of(session, row, incident)
    is_new = gpu_health.record(session, row, incident, fault, holders)
    if not fault.quarantines or row.health is Health.LOST:
        return
    # A recurring error keeps its first reason and causes no further events.
    if is_new or row.health is Health.HEALTHY:
        message = incident.message[: gpu_health.MESSAGE_MAX]
        _set_health(session, row, Health.QUARANTINED, Reason(code=code, message=message), holders)


def _unseen(newest_id: str | None, uuid: str, reported: Sequence[Incident]) -> Sequence[Incident]:
    """Incidents after the newest stored one: until a report is answered, its node repeats them in order."""
    of_gpu = [incident for incident in reported if incident.uuid == uuid]
    known = [at for at, incident in enumerate(of_gpu) if incident.id == newest_id]
    return of_gpu[known[-1] + 1 :] if known else of_gpu


def clear(session: Session, access: Access, uuid: str) -> Gpu:
    """Return a quarantined GPU to use, at an admin's request.

    Raises:
        NotFound: no such GPU.
        Conflict: it is lost; only a report of its node can bring it back.
    """
    row = get(session, uuid)
    # Reports write the health while they hold this lock; it may have changed since the row was read.
    locks.node(session, row.node_id)
    session.refresh(row)
    if row.health is Health.LOST:
        raise GpuLost(f"{uuid} is lost; it can be cleared once its node lists it again")
    audit_log.record(
        session, access, uuid, None,
        before={"health": str(row.health), "reason": row.health_reason},
        after={"health": str(Health.HEALTHY)},
    )  # fmt: skip
    _set_health(session, row, Health.HEALTHY, None)
    return row


def get(session: Session, uuid: str) -> Gpu:
    """Raises NotFound for a GPU that does not exist or whose node is deleted."""
    row = session.get(Gpu, uuid)
    node = session.get(Node, row.node_id) if row else None
    if row is None or node is None or node.deleted_at is not None:
        raise NotFound(f"no GPU {uuid}")
    return row


def require_visible_metrics(session: Session, access: Access, uuid: str) -> None:
    """Check that the caller may see the metrics of a GPU, since they reveal what its instances do.

    Raises:
        Forbidden: a project that the caller cannot see uses it.
    """
    query = select(Allocation.project_id).where(Allocation.gpu_uuid == uuid, Allocation.to_at.is_(None))
    if not all(access.caller.sees(holder) for holder in session.scalars(query.distinct())):
        raise Forbidden(f"another project uses {uuid}; only that project and admins can see its metrics")


def is_held(session: Session, uuid: str) -> bool:
    """Whether any of the GPU is allocated now."""
    query = select(Allocation.id).where(Allocation.gpu_uuid == uuid, Allocation.to_at.is_(None)).limit(1)
    return session.scalar(query) is not None
