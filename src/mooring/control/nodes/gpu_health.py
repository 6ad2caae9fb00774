"""Conditions and incidents of GPUs, and who can see them.

    condition   a present fault: one row for each code; for application faults one for each code and project
    incident    something that happened: equal incidents within an hour are one row with a count

All users see the codes of fatal conditions and warnings: they concern the machine. Application faults and
all messages concern one project: only admins and the project whose instance used the GPU see them.
Both tables have a maximum number of rows for each GPU, however often a program faults.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from mooring.control import events, locks, revisions
from mooring.control.events import EventKind
from mooring.core import ids
from mooring.core.xid import GpuFault, classify
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Allocation, Gpu, GpuCondition, GpuIncident
from mooring.db.types import JsonObject, new_id, now
from mooring.schemas.agent import Incident
from mooring_client.schemas.gpus import Health, Severity
from mooring_client.schemas.states import Reason

# Equal faults within this time are one incident and one event.
ONE_INCIDENT: Final = timedelta(hours=1)
# Warnings and application faults expire if they do not recur for this long. An admin clears fatal faults.
EXPIRES_AFTER: Final = timedelta(hours=24)
CONDITIONS_KEPT: Final = 64  # for each GPU
INCIDENTS_KEPT: Final = 100  # for each GPU: of application faults, and as many of all others
MESSAGE_MAX: Final = 1024
_CODE: Final = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)
_NO_PROJECT: Final = ""  # the project of a condition that concerns the machine


@dataclass(frozen=True, slots=True)
class GpuHolder:
    instance_id: str
    project_id: str
    mig_uuid: str | None


def code_of(reported: str) -> str:
    """The code that a node reports, or `unknown_fault` if it is not a valid code."""
    return reported if _CODE.fullmatch(reported) else "unknown_fault"


def fault_of(row: Gpu, code: str) -> GpuFault:
    return classify(code, (row.facts or {}).get("recovery_action"))


def holders_of(session: Session, row: Gpu, incident: Incident | None = None) -> list[GpuHolder]:
    """The present holders of the GPU; if the incident names an instance or MIG devices, only theirs."""
    query = select(Allocation.instance_id, Allocation.project_id, Allocation.mig_uuid)
    query = query.where(Allocation.gpu_uuid == row.uuid, Allocation.to_at.is_(None))
    found = [GpuHolder(*each) for each in session.execute(query.order_by(Allocation.id))]
    if incident is not None and incident.instance_id is not None:
        return [each for each in found if each.instance_id == incident.instance_id]
    if incident is not None and incident.mig_uuids:
        return [each for each in found if each.mig_uuid in incident.mig_uuids]
    return found


def only_project(holders: Sequence[GpuHolder]) -> str | None:
    """The project that may see a message; null: none or several use the GPU, so only admins may."""
    projects = {each.project_id for each in holders}
    return projects.pop() if len(projects) == 1 else None


def record(
    session: Session, row: Gpu, incident: Incident, fault: GpuFault, holders: Sequence[GpuHolder]
) -> bool:
    """Store an incident and append events to affected instances; returns whether its condition is new."""
    code, project_id = code_of(incident.code), only_project(holders)
    of_project = project_id if fault.severity is Severity.INFO else None
    is_new = _store_condition(session, row, code, fault, of_project or _NO_PROJECT, incident.count)
    is_new_incident = _record_incident(session, row, incident, fault, holders)
    # If several projects have MIG devices of the GPU, it is unknown whose program caused the fault.
    if is_new_incident and fault.notify_instance and project_id is not None:
        kind, reason = EventKind.INSTANCE_GPU_FAULT, _reason(code, fault)
        for each in holders:
            _append_event(session, kind, row, each, reason, fault, incident.count)
    return is_new


def has_condition(session: Session, row: Gpu, code: str) -> bool:
    return session.get(GpuCondition, (row.uuid, code, _NO_PROJECT)) is not None


def apply_health(
    session: Session, row: Gpu, health: Health, reason: Reason | None, holders: Sequence[GpuHolder]
) -> None:
    """Update conditions after a change of health, and append events to the instances that use the GPU.

    Args:
        holders: those whom the reason concerns.
    """
    if health is Health.HEALTHY or reason is None:
        query = delete(GpuCondition).where(
            GpuCondition.gpu_uuid == row.uuid,
            GpuCondition.standing.is_(False),
            GpuCondition.severity != str(Severity.INFO),
        )
        session.execute(query)
        set_placed_last(session, row)
        return
    fault = fault_of(row, reason.code)
    if not has_condition(session, row, reason.code):
        _store_condition(session, row, reason.code, _as_fatal(fault), _NO_PROJECT, 1)
    project_id = only_project(holders)
    kind, fatal = EventKind.INSTANCE_GPU_UNHEALTHY, _as_fatal(fault)
    for each in holders_of(session, row):
        shown = reason if each.project_id == project_id else _reason(reason.code, fault)
        _append_event(session, kind, row, each, shown, fatal, health=health)


def set_standing(session: Session, row: Gpu, codes: Sequence[str]) -> None:
    """Replace the standing conditions: those that exist for as long as the node lists them."""
    wanted = {code_of(code) for code in codes}
    query = select(GpuCondition).where(GpuCondition.gpu_uuid == row.uuid, GpuCondition.standing.is_(True))
    stored = {each.code: each for each in session.scalars(query)}
    for code in sorted(stored.keys() - wanted):
        session.delete(stored[code])
    for code in sorted(wanted - stored.keys()):
        fault = fault_of(row, code)
        if fault.severity is Severity.FATAL:  # such a fault is reported as `GpuFacts.fault`
            fault = GpuFault(Severity.WARN, fault.action, fault.description)
        _store_condition(session, row, code, fault, _NO_PROJECT, 1, standing=True)
    if stored.keys() != wanted:
        set_placed_last(session, row)


def set_placed_last(session: Session, row: Gpu) -> None:
    """Set whether the GPU is allocated last: it is as long as it has a warning."""
    session.flush()
    query = select(func.count()).where(
        GpuCondition.gpu_uuid == row.uuid, GpuCondition.severity == str(Severity.WARN)
    )
    last = bool(session.scalar(query))
    if row.placed_last != last:
        row.placed_last = last
        revisions.changed(session, row.node_id)
        notify(session, Topic.SCHEDULE)


def delete_expired(session: Session) -> None:
    """Delete conditions that have not recurred for `EXPIRES_AFTER`, except standing and fatal ones."""
    due = (
        GpuCondition.last_at < now() - EXPIRES_AFTER,
        GpuCondition.standing.is_(False),
        GpuCondition.severity != str(Severity.FATAL),
    )
    query = select(Gpu.uuid, Gpu.node_id).join(GpuCondition, GpuCondition.gpu_uuid == Gpu.uuid).where(*due)
    found = dict(session.execute(query).all())
    locks.nodes(session, found.values())
    session.execute(delete(GpuCondition).where(*due))
    for uuid in sorted(found):
        row = session.get(Gpu, uuid, populate_existing=True)
        if row is not None:
            set_placed_last(session, row)


def _store_condition(
    session: Session,
    row: Gpu,
    code: str,
    fault: GpuFault,
    project_id: str,
    count: int,
    *,
    standing: bool = False,
) -> bool:
    """Insert or update a condition; returns whether it is new."""
    at = now()
    found = session.get(GpuCondition, (row.uuid, code, project_id))
    if found is not None:
        found.count, found.last_at = min(found.count + count, 2**31 - 1), at
        found.severity, found.action = str(fault.severity), str(fault.action)
        return False
    session.add(
        GpuCondition(
            gpu_uuid=row.uuid, code=code, project_id=project_id, severity=str(fault.severity),
            action=str(fault.action), since=at, last_at=at, count=count, standing=standing,
        )
    )  # fmt: skip
    _drop_oldest_conditions(session, row.uuid)
    if fault.severity is Severity.WARN:
        set_placed_last(session, row)
    return True


def _drop_oldest_conditions(session: Session, uuid: str) -> None:
    """Limit the conditions of a GPU. Application faults go first: they must not displace machine faults."""
    session.flush()
    of_application = GpuCondition.severity == str(Severity.INFO)
    query = (
        select(GpuCondition)
        .where(GpuCondition.gpu_uuid == uuid)
        .order_by(of_application, GpuCondition.last_at.desc(), GpuCondition.code)
        .offset(CONDITIONS_KEPT)
    )
    for extra in session.scalars(query).all():
        session.delete(extra)


def _record_incident(
    session: Session, row: Gpu, incident: Incident, fault: GpuFault, holders: Sequence[GpuHolder]
) -> bool:
    """Insert an incident or count it with an equal one of the last hour; returns whether it is new."""
    code, at, project_id = code_of(incident.code), now(), only_project(holders)
    instance_id = holders[0].instance_id if len({each.instance_id for each in holders}) == 1 else None
    equal = _newest_equal(session, row.uuid, code, project_id, instance_id, at - ONE_INCIDENT)
    if equal is not None:
        equal.count, equal.last_at = min(equal.count + incident.count, 2**31 - 1), at
        return False
    session.add(
        GpuIncident(
            id=new_id(ids.GPU_INCIDENT), gpu_uuid=row.uuid, node_id=row.node_id, code=code,
            severity=str(fault.severity), action=str(fault.action),
            message=incident.message[:MESSAGE_MAX], project_id=project_id, instance_id=instance_id,
            since=at, last_at=at, count=incident.count,
        )
    )  # fmt: skip
    _drop_oldest_incidents(session, row.uuid, of_application=fault.severity is Severity.INFO)
    return True


def _newest_equal(
    session: Session, uuid: str, code: str, project_id: str | None, instance_id: str | None, since: datetime
) -> GpuIncident | None:
    query = (
        select(GpuIncident)
        .where(
            GpuIncident.gpu_uuid == uuid,
            GpuIncident.code == code,
            GpuIncident.project_id.is_not_distinct_from(project_id),
            GpuIncident.instance_id.is_not_distinct_from(instance_id),
            GpuIncident.since > since,
        )
        .order_by(GpuIncident.id.desc())
        .limit(1)
    )
    return session.scalar(query)


def _drop_oldest_incidents(session: Session, uuid: str, *, of_application: bool) -> None:
    session.flush()
    info = GpuIncident.severity == str(Severity.INFO)
    query = (
        select(GpuIncident)
        .where(GpuIncident.gpu_uuid == uuid, info if of_application else ~info)
        .order_by(GpuIncident.id.desc())
        .offset(INCIDENTS_KEPT)
    )
    for extra in session.scalars(query).all():
        session.delete(extra)


def _as_fatal(fault: GpuFault) -> GpuFault:
    """A fault that takes a GPU out of use is fatal, whatever the severity of its code is otherwise."""
    return GpuFault(Severity.FATAL, fault.action, fault.description)


def _reason(code: str, fault: GpuFault) -> Reason:
    """A general message, which reveals nothing of the instances that used the GPU."""
    return Reason(code=code, message=fault.description)


def _append_event(
    session: Session, kind: EventKind, row: Gpu, holder: GpuHolder, reason: Reason, fault: GpuFault,
    count: int = 1, health: Health | None = None,
) -> None:  # fmt: skip
    data: JsonObject = {
        "instance_id": holder.instance_id,
        "gpu_uuid": row.uuid,
        "mig_uuid": holder.mig_uuid,
        "health": str(health or row.health),
        "severity": str(fault.severity),
        "action": str(fault.action),
        "count": count,
        "reason": reason.model_dump(),
    }
    events.append(session, kind, data, project_id=holder.project_id, instance_id=holder.instance_id)
