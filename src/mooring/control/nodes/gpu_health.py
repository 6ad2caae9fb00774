"""What is wrong with GPUs, and who is told of it.

    condition   what is so now: one row for each code; of application faults one for each code and project
    incident    what happened: equal ones of one hour are one row with a count

Fatal conditions and warnings are facts about the machine: everybody sees their codes. What an application
fault says, and each message, is about somebody's work: it is for admins and the project whose instance had
the GPU at that moment. Both tables are bounded for each GPU, however often a program faults.
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
from mooring.core.gpu import Health
from mooring.core.instance.state import Reason
from mooring.core.xid import Severity, XidVerdict, judge
from mooring.db.session import notify
from mooring.db.signals import Topic
from mooring.db.tables import Allocation, Gpu, GpuCondition, GpuIncident
from mooring.db.types import JsonObject, new_id, now
from mooring.schemas.agent import Incident

# Equal faults within this are one incident, of which the instance is told once.
ONE_INCIDENT: Final = timedelta(hours=1)
# A warning or application fault that has not come back for so long is over. A fatal one an admin clears.
FORGOTTEN_AFTER: Final = timedelta(hours=24)
CONDITIONS_KEPT: Final = 64  # for each GPU
INCIDENTS_KEPT: Final = 100  # for each GPU, of application faults and of all else
MESSAGE_MAX: Final = 1024
_CODE: Final = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)
_NOBODY: Final = ""  # a condition's project, where it is the machine's


@dataclass(frozen=True, slots=True)
class GpuHolder:
    instance_id: str
    project_id: str
    mig_uuid: str | None


def code_of(told: str) -> str:
    """A node's word, where it is one."""
    return told if _CODE.fullmatch(told) else "unknown_fault"


def verdict_of(row: Gpu, code: str) -> XidVerdict:
    return judge(code, (row.facts or {}).get("recovery_action"))


def holders(session: Session, row: Gpu, incident: Incident | None = None) -> list[GpuHolder]:
    """Who has the GPU now; of an incident that names instance or MIG devices, those of them alone."""
    held = Allocation
    query = select(held.instance_id, held.project_id, held.mig_uuid).where(
        held.gpu_uuid == row.uuid, held.to_at.is_(None)
    )
    found = [GpuHolder(*each) for each in session.execute(query.order_by(held.id))]
    if incident is not None and incident.instance_id is not None:
        return [each for each in found if each.instance_id == incident.instance_id]
    if incident is not None and incident.mig_uuids:
        return [each for each in found if each.mig_uuid in incident.mig_uuids]
    return found


def only_project(held: Sequence[GpuHolder]) -> str | None:
    """Whose the message is. Where several projects have the GPU nobody can tell, and it is for admins."""
    projects = {each.project_id for each in held}
    return projects.pop() if len(projects) == 1 else None


def record(
    session: Session, row: Gpu, incident: Incident, verdict: XidVerdict, held: Sequence[GpuHolder]
) -> bool:
    """Keep an incident, and tell instances of an application fault; whether the condition is a new one."""
    code, project_id = code_of(incident.code), only_project(held)
    of_project = project_id if verdict.severity is Severity.INFO else None
    is_new = _raise_condition(session, row, code, verdict, of_project or _NOBODY, incident.count)
    began = _record_incident(session, row, incident, verdict, held)
    # Of several projects that have MIG devices of the GPU it is not known whose fault it was.
    if began and verdict.told and project_id is not None:
        for each in held:
            _tell(
                session,
                EventKind.INSTANCE_GPU_FAULT,
                row,
                each,
                _reason(code, verdict),
                verdict,
                incident.count,
            )
    return is_new


def has_condition(session: Session, row: Gpu, code: str) -> bool:
    return session.get(GpuCondition, (row.uuid, code, _NOBODY)) is not None


def became(
    session: Session, row: Gpu, health: Health, reason: Reason | None, held: Sequence[GpuHolder]
) -> None:
    """Follow a change of health: conditions, and events to whoever has the GPU now.

    Args:
        held: those whom the reason is about.
    """
    if health is Health.HEALTHY or reason is None:
        query = delete(GpuCondition).where(
            GpuCondition.gpu_uuid == row.uuid,
            GpuCondition.standing.is_(False),
            GpuCondition.severity != str(Severity.INFO),
        )
        session.execute(query)
        settle_placement(session, row)
        return
    verdict = verdict_of(row, reason.code)
    if not has_condition(session, row, reason.code):
        _raise_condition(session, row, reason.code, _as_fatal(verdict), _NOBODY, 1)
    project_id = only_project(held)
    for each in holders(session, row):
        own = each.project_id == project_id
        told = reason if own else _reason(reason.code, verdict)
        _tell(session, EventKind.INSTANCE_GPU_UNHEALTHY, row, each, told, _as_fatal(verdict), health=health)


def note_standing(session: Session, row: Gpu, codes: Sequence[str]) -> None:
    """These conditions hold for as long as the node lists them, and no others of that sort."""
    wanted = {code_of(code) for code in codes}
    query = select(GpuCondition).where(GpuCondition.gpu_uuid == row.uuid, GpuCondition.standing.is_(True))
    there = {each.code: each for each in session.scalars(query)}
    for code in sorted(there.keys() - wanted):
        session.delete(there[code])
    for code in sorted(wanted - there.keys()):
        verdict = verdict_of(row, code)
        if verdict.severity is Severity.FATAL:  # what takes a GPU out of use has ways of its own
            verdict = XidVerdict(Severity.WARN, verdict.action, verdict.description)
        _raise_condition(session, row, code, verdict, _NOBODY, 1, standing=True)
    if there.keys() != wanted:
        settle_placement(session, row)


def settle_placement(session: Session, row: Gpu) -> None:
    """A GPU with a warning is given out last."""
    session.flush()
    query = select(func.count()).where(
        GpuCondition.gpu_uuid == row.uuid, GpuCondition.severity == str(Severity.WARN)
    )
    last = bool(session.scalar(query))
    if row.placed_last != last:
        row.placed_last = last
        revisions.changed(session, row.node_id)
        notify(session, Topic.SCHEDULE)


def forget_old(session: Session) -> None:
    """Drop what has not come back for a day."""
    over = (
        GpuCondition.last_at < now() - FORGOTTEN_AFTER,
        GpuCondition.standing.is_(False),
        GpuCondition.severity != str(Severity.FATAL),
    )
    query = select(Gpu.uuid, Gpu.node_id).join(GpuCondition, GpuCondition.gpu_uuid == Gpu.uuid).where(*over)
    found = dict(session.execute(query).all())
    locks.nodes(session, found.values())
    session.execute(delete(GpuCondition).where(*over))
    for uuid in sorted(found):
        row = session.get(Gpu, uuid, populate_existing=True)
        if row is not None:
            settle_placement(session, row)


def _raise_condition(
    session: Session,
    row: Gpu,
    code: str,
    verdict: XidVerdict,
    project_id: str,
    count: int,
    *,
    standing: bool = False,
) -> bool:
    """Whether it was not there before."""
    moment = now()
    found = session.get(GpuCondition, (row.uuid, code, project_id))
    if found is not None:
        found.count, found.last_at = min(found.count + count, 2**31 - 1), moment
        found.severity, found.action = str(verdict.severity), str(verdict.action)
        return False
    session.add(
        GpuCondition(
            gpu_uuid=row.uuid, code=code, project_id=project_id, severity=str(verdict.severity),
            action=str(verdict.action), since=moment, last_at=moment, count=count, standing=standing,
        )
    )  # fmt: skip
    _drop_oldest_conditions(session, row.uuid)
    if verdict.severity is Severity.WARN:
        settle_placement(session, row)
    return True


def _drop_oldest_conditions(session: Session, uuid: str) -> None:
    """Application faults go first: nobody's program pushes out what is wrong with the machine."""
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
    session: Session, row: Gpu, incident: Incident, verdict: XidVerdict, held: Sequence[GpuHolder]
) -> bool:
    """Whether it is a new one; else it is counted with the one of the last hour."""
    code, moment, project_id = code_of(incident.code), now(), only_project(held)
    instance_id = held[0].instance_id if len({each.instance_id for each in held}) == 1 else None
    same = _newest_same(session, row.uuid, code, project_id, instance_id, moment - ONE_INCIDENT)
    if same is not None:
        same.count, same.last_at = min(same.count + incident.count, 2**31 - 1), moment
        return False
    session.add(
        GpuIncident(
            id=new_id(ids.GPU_INCIDENT), gpu_uuid=row.uuid, node_id=row.node_id, code=code,
            severity=str(verdict.severity), action=str(verdict.action),
            message=incident.message[:MESSAGE_MAX], project_id=project_id, instance_id=instance_id,
            since=moment, last_at=moment, count=incident.count,
        )
    )  # fmt: skip
    _drop_oldest_incidents(session, row.uuid, of_application=verdict.severity is Severity.INFO)
    return True


def _newest_same(
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


def _as_fatal(verdict: XidVerdict) -> XidVerdict:
    """The reason why a GPU is out of use is fatal, whatever its code says elsewhere."""
    return XidVerdict(Severity.FATAL, verdict.action, verdict.description)


def _reason(code: str, verdict: XidVerdict) -> Reason:
    """In words that say nothing of whoever had the GPU."""
    return Reason(code=code, message=verdict.description)


def _tell(
    session: Session, kind: EventKind, row: Gpu, holder: GpuHolder, reason: Reason, verdict: XidVerdict,
    count: int = 1, health: Health | None = None,
) -> None:  # fmt: skip
    data: JsonObject = {
        "instance_id": holder.instance_id,
        "gpu_uuid": row.uuid,
        "mig_uuid": holder.mig_uuid,
        "health": str(health or row.health),
        "severity": str(verdict.severity),
        "action": str(verdict.action),
        "count": count,
        "reason": reason.model_dump(),
    }
    events.append(session, kind, data, project_id=holder.project_id, instance_id=holder.instance_id)
