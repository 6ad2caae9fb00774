"""Events that nothing else causes: instances that end soon, and quotas that are nearly used.

Each is announced once: the row of the instance or the project has what was announced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from mooring.control import events, locks
from mooring.control.events import EventKind
from mooring.control.scheduling import quotas
from mooring.control.scheduling.quotas import UsedQuota
from mooring.db.tables import Instance, Project
from mooring.db.types import now
from mooring_client.schemas.base import timestamp
from mooring_client.schemas.states import DesiredState

# An instance whose whole duration is shorter is not announced: its user knows.
BEFORE_EXPIRY: Final = timedelta(minutes=15)
NEARLY_PCT: Final = 80


def expiring(session: Session) -> Sequence[str]:
    """The ids of instances that reach their maximum duration within 15 minutes, and are not announced yet."""
    query = select(Instance.id).where(
        Instance.expires_at.is_not(None),
        Instance.expires_at <= now() + BEFORE_EXPIRY,
        Instance.desired_state == DesiredState.RUNNING,
        Instance.max_duration_s > BEFORE_EXPIRY.total_seconds(),
        or_(Instance.expiry_announced.is_(None), Instance.expiry_announced != Instance.expires_at),
    )
    return session.scalars(query).all()


def announce_expiry(session: Session, instance_id: str) -> None:
    row = locks.instances(session, [instance_id]).get(instance_id)
    if row is None or row.expires_at is None or row.expiry_announced == row.expires_at:
        return
    row.expiry_announced = row.expires_at
    data = {"instance_id": row.id, "version": row.version, "expires_at": timestamp(row.expires_at)}
    events.append(session, EventKind.INSTANCE_EXPIRING, data, project_id=row.project_id, instance_id=row.id)


@dataclass(frozen=True, slots=True)
class ChangedQuotas:
    """A project whose nearly used quotas differ from what was announced."""

    project_id: str
    used: Mapping[str, UsedQuota]


def changed_quotas(session: Session) -> list[ChangedQuotas]:
    """Projects with a quota that has become nearly used, or is so no more."""
    query = select(Project.id, Project.quotas, Project.quotas_announced).where(Project.deleted_at.is_(None))
    rows = {row.id: row for row in session.execute(query) if any(row.quotas.values()) or row.quotas_announced}
    used = quotas.used(session, {row.id: row.quotas for row in rows.values()})
    found = []
    for project_id, row in rows.items():
        nearly = {name: each for name, each in used[project_id].items() if _is_nearly_used(each)}
        if sorted(nearly) != sorted(row.quotas_announced or ()):
            found.append(ChangedQuotas(project_id, nearly))
    return found


def _is_nearly_used(each: UsedQuota) -> bool:
    return each.limit > 0 and each.used * 100 >= each.limit * NEARLY_PCT


def announce_quotas(session: Session, changed: ChangedQuotas) -> None:
    """Append an event for each quota that was not announced, and forget those that are below 80 % again."""
    row = locks.projects(session, [changed.project_id]).get(changed.project_id)
    if row is None or row.deleted_at is not None:
        return
    announced = row.quotas_announced or []
    row.quotas_announced = sorted(changed.used) or None
    for name, each in sorted(changed.used.items()):
        if name in announced:
            continue
        data = {
            "project_id": row.id, "project_name": row.name, "quota": name, "limit": each.limit,
            "used": each.used, "percent": int(each.used * 100 / each.limit),
        }  # fmt: skip
        events.append(session, EventKind.PROJECT_QUOTA_NEARLY_USED, data, project_id=row.id)
