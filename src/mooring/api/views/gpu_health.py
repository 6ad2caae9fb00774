"""GPU health. All callers see codes; only the project concerned sees messages and application faults."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, or_, select
from sqlalchemy.orm import Session

from mooring.api.views.show import show
from mooring.core.access import Access
from mooring.core.xid import classify
from mooring.db import tables
from mooring_client.schemas.base import Json
from mooring_client.schemas.gpus import Health, Severity
from mooring_client.schemas.nodes import GpuCondition, GpuIncident, Placement

_WORST_FIRST = {str(severity): place for place, severity in enumerate(reversed(Severity))}


def health(row: tables.Gpu, conditions: Sequence[tables.GpuCondition], access: Access) -> Json:
    """Return the health fields of a GPU."""
    placement = Placement.LAST if row.placed_last else Placement.NORMAL
    return {
        "health": row.health,
        "reason": _reason(row, access),
        "conditions": [show(GpuCondition, each) for each in conditions if _is_shown(each, access)],
        "placement": placement if row.health is Health.HEALTHY else Placement.NONE,
        "recovery": None,
    }


def conditions_of(session: Session, uuids: Sequence[str]) -> dict[str, list[tables.GpuCondition]]:
    """Return the conditions of each GPU by UUID, the worst first."""
    rows = session.scalars(select(tables.GpuCondition).where(tables.GpuCondition.gpu_uuid.in_(uuids)))
    found: dict[str, list[tables.GpuCondition]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (_WORST_FIRST[row.severity], row.since, row.code)):
        found[row.gpu_uuid].append(row)
    return found


def _reason(row: tables.Gpu, access: Access) -> Json | None:
    """The node's message may contain PIDs and program names; other projects get the code's description."""
    if row.health_reason is None:
        return None
    is_own = access.caller.sees(row.reason_project_id)
    code = row.health_reason["code"]
    return {"code": code, "message": row.health_reason["message"] if is_own else _meaning(code)}


def _meaning(code: str) -> str:
    return classify(code, None).description


def _is_shown(row: tables.GpuCondition, access: Access) -> bool:
    """Everyone sees faults of the machine, only the project concerned an application fault."""
    return row.severity != str(Severity.INFO) or access.caller.sees(row.project_id)


def visible_incidents(access: Access, uuid: str) -> Select[Any]:
    incidents = tables.GpuIncident
    query = select(incidents).where(incidents.gpu_uuid == uuid)
    if access.projects is None:
        return query
    return query.where(
        or_(incidents.severity != str(Severity.INFO), incidents.project_id.in_(access.projects))
    )


def incident(access: Access, row: tables.GpuIncident) -> Json:
    is_own = access.caller.sees(row.project_id)
    message = row.message if is_own else _meaning(row.code)
    return show(GpuIncident, row, message=message, instance_id=row.instance_id if is_own else None)
