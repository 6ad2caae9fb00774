"""GPUs: what nodes report of them becomes inventory, and what goes wrong with one takes it out of use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import events, locks, revisions
from mooring.control.audit import audit_log
from mooring.control.events import EventKind
from mooring.control.nodes import approval, gpu_health
from mooring.core.access import Access
from mooring.core.errors import Conflict, Forbidden, NotFound
from mooring.core.gpu import GpuFacts, Health
from mooring.core.instance.state import Reason
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Allocation, Gpu, Node
from mooring.db.types import JsonObject
from mooring.schemas.agent import Incident


@dataclass(frozen=True, slots=True)
class InventoryDifference:
    """What is approved of a node's GPUs after a report, and where the report differs from it."""

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
    """Make the node's GPUs what it says they are, within what is approved of them.

    A card it no longer lists is lost, never deleted. One that another node has stays there, whoever claims
    it: UUIDs are shown to everybody, so a claim proves nothing.

    Args:
        approved: by UUID; null: this is the first inventory, which is approved as it is.
    """
    kept, changes = dict(approved or {}), list[JsonObject]()
    listed = {gpu.uuid: gpu for gpu in reported}
    known = {
        gpu.uuid: gpu
        for gpu in session.scalars(select(Gpu).where((Gpu.node_id == node.id) | Gpu.uuid.in_(list(listed))))
    }
    for uuid, facts in listed.items():
        row = known.get(uuid)
        if row is not None and row.node_id != node.id and not _may_move(session, row):
            told = approval.values_of_gpu(facts)
            changes.append(approval.change("gpu", None, told, gpu_uuid=uuid, node_id=row.node_id))
        elif approved is not None and uuid not in approved:
            changes.append(approval.change("gpu", None, approval.values_of_gpu(facts), gpu_uuid=uuid))
        elif row is not None and uuid in kept and not _differs(row, node, facts):
            _judge(session, row, facts)  # the usual case
        else:
            judged = approval.judge_gpu(kept.get(uuid, {}), facts)
            kept[uuid] = judged.approved
            changes += judged.changes
            _take_in(session, node, row, GpuFacts.model_validate(judged.effective), simulated=simulated)
    for uuid in sorted(known.keys() - listed.keys()):
        _set_health(
            session,
            known[uuid],
            Health.LOST,
            Reason(code="gpu_missing", message="its node no longer lists it"),
        )
    return InventoryDifference(kept, changes)


def _take_in(session: Session, node: Node, row: Gpu | None, facts: GpuFacts, *, simulated: bool) -> None:
    if facts.mig_devices and (row is None or _differs(row, node, facts)):
        facts = _without_others_devices(session, facts)
    if row is None:
        row = Gpu(uuid=facts.uuid, health=Health.HEALTHY)
        session.add(row)  # only now: the query above would write it as it is
    if _differs(row, node, facts):
        revisions.changed(session, node.id, row.node_id)
        row.node_id, row.index, row.model = node.id, facts.index, facts.model
        row.memory_mib, row.facts, row.simulated = facts.memory_mib, facts.model_dump(mode="json"), simulated
        gpu_health.note_standing(session, row, facts.conditions)
        notify(session, Topic.SCHEDULE)
    _judge(session, row, facts)


def _differs(row: Gpu, node: Node, facts: GpuFacts) -> bool:
    return row.node_id != node.id or row.facts != facts.model_dump(mode="json")


def _without_others_devices(session: Session, facts: GpuFacts) -> GpuFacts:
    """A MIG device is on one card: one that another lists could not be given out there any more."""
    query = select(Gpu.facts).where(Gpu.uuid != facts.uuid, Gpu.facts["mig_mode"].as_string() == "enabled")
    others = {device["uuid"] for told in session.scalars(query) for device in told["mig_devices"]}
    own = [device for device in facts.mig_devices if device.uuid not in others]
    return facts.model_copy(update={"mig_devices": own})


def _may_move(session: Session, row: Gpu) -> bool:
    """A card may turn up in another machine once its old node is deleted; else an admin moves it."""
    owner = session.get(Node, row.node_id)
    return (owner is None or owner.deleted_at is not None) and not is_held(session, row.uuid)


def move(session: Session, node: Node, uuid: str, owner_id: str) -> None:
    """Give a card of another node to this one, on an admin's word; both nodes are locked.

    Raises:
        Conflict: code `gpu_in_use`: an instance holds some of it; `facts_changed_again`: another node has it.
    """
    row = session.get_one(Gpu, uuid, populate_existing=True)
    if row.node_id != owner_id:
        raise Conflict(f"{uuid} has moved meanwhile; read the node again", code="facts_changed_again")
    if is_held(session, uuid):
        raise Conflict(f"an instance on node {row.node_id} holds {uuid}; end it first", code="gpu_in_use")
    owner = session.get_one(Node, row.node_id)
    approved = dict(owner.approved or {})
    theirs = approved.get(approval.GPUS) or {}
    owner.approved = {**approved, approval.GPUS: {key: theirs[key] for key in theirs if key != uuid}}
    revisions.changed(session, node.id, row.node_id)
    row.node_id = node.id


def _judge(session: Session, row: Gpu, facts: GpuFacts) -> None:
    if facts.fault:
        code = gpu_health.code_of(facts.fault)
        health = Health.LOST if code == "gpu_lost" else Health.QUARANTINED
        # One that is out of use already keeps its reason, but for a fault that is new.
        known = row.health is health and (
            (row.health_reason or {}).get("code") == code or gpu_health.has_condition(session, row, code)
        )
        if row.health is not Health.LOST and not known:
            _set_health(session, row, health, Reason(code=code, message=f"the driver says {code}"))
    elif row.health is Health.LOST:
        _set_health(
            session, row, Health.QUARANTINED,
            Reason(code="gpu_returned", message="it was lost and is back; clear it once you trust it"),
        )  # fmt: skip


def _set_health(
    session: Session,
    row: Gpu,
    health: Health,
    reason: Reason | None,
    about: Sequence[gpu_health.GpuHolder] | None = None,
) -> None:
    """Args: about: whose work the reason tells of; null: whoever has the GPU now."""
    told = reason.model_dump() if reason else None
    if (row.health, row.health_reason) == (health, told):
        return
    before, row.health, row.health_reason = row.health, health, told
    held = gpu_health.holders(session, row) if about is None else about
    row.reason_project_id = gpu_health.only_project(held) if reason else None
    gpu_health.became(session, row, health, reason, held)
    revisions.changed(session, row.node_id)
    events.append(
        session,
        EventKind.GPU_HEALTH_CHANGED,
        {
            "gpu_uuid": row.uuid,
            "node_id": row.node_id,
            "from": str(before),
            "to": str(health),
            "reason": told,
        },
    )
    notify(session, Topic.SCHEDULE, Topic.GPU_HEALTH)


def apply_incidents(
    session: Session, node: Node, incidents: Sequence[Incident], faults: Sequence[Incident] = ()
) -> None:
    """Judge what went wrong; what is fatal quarantines. Repeating it does not undo an admin's clearing.

    Which list an incident comes in decides nothing: nodes of an earlier release have one list only, and call
    faults of programs incidents too.
    """
    for uuid in dict.fromkeys(each.uuid for each in (*incidents, *faults)):
        row = session.get(Gpu, uuid)
        if row is None or row.node_id != node.id:
            continue
        new, new_faults = (
            _unheard(row.last_incident_id, uuid, incidents), _unheard(row.last_fault_id, uuid, faults)
        )  # fmt: skip
        row.last_incident_id = new[-1].id if new else row.last_incident_id
        row.last_fault_id = new_faults[-1].id if new_faults else row.last_fault_id
        for incident in _merged((*new, *new_faults)):
            _take_incident(session, row, incident)


def _merged(incidents: Sequence[Incident]) -> list[Incident]:
    """Equal ones as one with their count, so that a report of a thousand costs what its kinds cost."""
    found: dict[tuple[str, str | None, tuple[str, ...]], Incident] = {}
    for each in incidents:
        kind = (each.code, each.instance_id, tuple(each.mig_uuids))
        before = found[kind].count if kind in found else 0
        found[kind] = each.model_copy(update={"count": min(before + each.count, 2**31 - 1)})
    return list(found.values())


def _take_incident(session: Session, row: Gpu, incident: Incident) -> None:
    code = gpu_health.code_of(incident.code)
    verdict = gpu_health.verdict_of(row, code)
    held = gpu_health.holders(session, row, incident)
    is_new = gpu_health.record(session, row, incident, verdict, held)
    if not verdict.quarantines or row.health is Health.LOST:
        return
    # The same error again and again is one reason, and not an event each time.
    if is_new or row.health is Health.HEALTHY:
        message = incident.message[: gpu_health.MESSAGE_MAX]
        _set_health(session, row, Health.QUARANTINED, Reason(code=code, message=message), held)


def _unheard(newest_id: str | None, uuid: str, told: Sequence[Incident]) -> Sequence[Incident]:
    """Those after the newest one on record: a node repeats all of them, in order, until it is answered."""
    of_gpu = [incident for incident in told if incident.uuid == uuid]
    known = [at for at, incident in enumerate(of_gpu) if incident.id == newest_id]
    return of_gpu[known[-1] + 1 :] if known else of_gpu


def clear(session: Session, access: Access, uuid: str) -> Gpu:
    """An admin's word that a quarantined GPU can be trusted again.

    Raises:
        NotFound: no such GPU.
        Conflict: it is lost; only its node's report brings it back.
    """
    row = get(session, uuid)
    # Reports write health under their node's lock: one that comes in right now must not be overwritten.
    locks.node(session, row.node_id)
    session.refresh(row)
    if row.health is Health.LOST:
        raise Conflict(f"{uuid} is lost; it can be cleared once its node lists it again", code="gpu_lost")
    audit_log.record(
        session, access, uuid, None,
        before={"health": str(row.health), "reason": row.health_reason},
        after={"health": str(Health.HEALTHY)},
    )  # fmt: skip
    _set_health(session, row, Health.HEALTHY, None)
    return row


def get(session: Session, uuid: str) -> Gpu:
    """Raises NotFound for a GPU of no node."""
    row = session.get(Gpu, uuid)
    node = session.get(Node, row.node_id) if row else None
    if row is None or node is None or node.deleted_at is not None:
        raise NotFound(f"no GPU {uuid}")
    return row


def require_visible_figures(session: Session, access: Access, uuid: str) -> None:
    """A GPU's figures tell what its holder does.

    Raises:
        Forbidden: another project holds some of it.
    """
    query = select(Allocation.project_id).where(Allocation.gpu_uuid == uuid, Allocation.to_at.is_(None))
    if not all(access.caller.sees(holder) for holder in session.scalars(query.distinct())):
        raise Forbidden(f"{uuid} is held by another project; its figures are for its holder and admins")


def is_held(session: Session, uuid: str) -> bool:
    """Whether an instance holds any of it now."""
    query = select(Allocation.id).where(Allocation.gpu_uuid == uuid, Allocation.to_at.is_(None)).limit(1)
    return session.scalar(query) is not None
