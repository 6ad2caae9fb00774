"""GPUs: what nodes report of them becomes inventory, and what goes wrong with one takes it out of use."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import audit, events, gpu_health, locks, revisions
from mooring.core.access import Access
from mooring.core.errors import Conflict, Forbidden, NotFound
from mooring.core.gpu import GpuFacts, Health
from mooring.core.instance import Reason
from mooring.db.session import nudge
from mooring.db.tables import Allocation, Gpu, Node
from mooring.schemas.agent import Incident


def apply_inventory(
    session: Session, node: Node, reported: Sequence[GpuFacts], *, simulated: bool
) -> Reason | None:
    """Make the node's GPUs what it says they are; a card it no longer lists is lost, never deleted.

    Returns:
        What is wrong with the node: it lists a card of another one.
    """
    claimed = None
    listed = {gpu.uuid: gpu for gpu in reported}
    known = {
        gpu.uuid: gpu
        for gpu in session.scalars(select(Gpu).where((Gpu.node_id == node.id) | Gpu.uuid.in_(list(listed))))
    }
    for uuid, facts in listed.items():
        row = known.get(uuid)
        if row is not None and row.node_id != node.id and not _may_move(session, row):
            claimed = Reason(
                code="gpu_claimed_elsewhere",
                message=f"{uuid} belongs to node {row.node_id}; two agents must not serve one machine",
            )
        else:
            _take_in(session, node, row, facts, simulated=simulated)
    for uuid in sorted(known.keys() - listed.keys()):
        _set_health(
            session,
            known[uuid],
            Health.LOST,
            Reason(code="gpu_missing", message="its node no longer lists it"),
        )
    return claimed


def _take_in(session: Session, node: Node, row: Gpu | None, facts: GpuFacts, *, simulated: bool) -> None:
    if row is None:
        row = Gpu(uuid=facts.uuid, health=Health.HEALTHY)
        session.add(row)
    if _differs(row, node, facts):
        revisions.changed(session, node.id, row.node_id)
        row.node_id, row.index, row.model = node.id, facts.index, facts.model
        row.memory_mib, row.facts, row.simulated = facts.memory_mib, facts.model_dump(mode="json"), simulated
        gpu_health.note_standing(session, row, facts.conditions)
        nudge(session, "schedule")
    _judge(session, row, facts)


def _differs(row: Gpu, node: Node, facts: GpuFacts) -> bool:
    return row.node_id != node.id or row.facts != facts.model_dump(mode="json")


def _may_move(session: Session, row: Gpu) -> bool:
    """A card may turn up in another machine once its old node is gone or has lost it, and nobody holds it."""
    owner = session.get(Node, row.node_id)
    let_go = owner is None or owner.deleted_at is not None or row.health is Health.LOST
    return let_go and not is_held(session, row.uuid)


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
    about: Sequence[gpu_health.Holder] | None = None,
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
        events.GPU_HEALTH_CHANGED,
        {
            "gpu_uuid": row.uuid,
            "node_id": row.node_id,
            "from": str(before),
            "to": str(health),
            "reason": told,
        },
    )
    nudge(session, "schedule", "gpu_health")


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
    audit.record(
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
