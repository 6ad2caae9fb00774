"""Applying instances: by id, or by name in a project."""

from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import applying, concurrency, locks
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.instances import instances
from mooring.core.access import Access
from mooring.core.json_differences import JsonDifference, differences
from mooring.db.tables import Instance, Project
from mooring_client.errors import NotFound
from mooring_client.schemas.base import Json
from mooring_client.schemas.instances import InstanceApply, InstancePatch
from mooring_client.schemas.states import DesiredState

CHANGEABLE: Final = frozenset(InstancePatch.model_fields)


def apply_by_name(
    session: Session,
    access: Access,
    project: Project,
    name: str,
    request: InstanceApply,
    if_match: int | None,
) -> ApplyResult[Instance]:
    """Create or change the instance of this name; an ended one keeps its name until it is deleted.

    Raises:
        NameTaken, Conflict: another request was faster; the whole transaction can be repeated.
        BeingDeleted: the instance of this name still exists, but not for long.
        MooringError: as `instances.create` and `instances.patch`.
    """
    named = request.model_copy(update={"name": name, "project_id": project.id})
    query = select(Instance.id).where(Instance.project_id == project.id, Instance.name == name)
    instance_id = session.scalar(query.where(Instance.deleted_at.is_(None)))
    if instance_id is None:
        applying.require_no_version("instance", name, if_match)
        return applying.created(instances.create(session, access, project, named))
    try:
        result = apply(session, access, instance_id, named, if_match)
    except NotFound:
        raise applying.changed_meanwhile("instance", name) from None
    if any(each.field == "name" for each in result.differences):
        raise applying.changed_meanwhile("instance", name)
    return result


def apply(
    session: Session, access: Access, instance_id: str, request: InstanceApply, if_match: int | None
) -> ApplyResult[Instance]:
    """Change the instance to what is requested. An omitted name or project stays as it is.

    Raises:
        BeingDeleted: it still exists, but not for long.
        MooringError: as `instances.patch`.
    """
    row = instances.get(session, access, instance_id)
    if _differences(row, request):
        # Compare again with what no other request can change. The order of the locks is that of `locks`.
        locks.placing(session)
        row, _node = locks.instance(session, access, instance_id)
    if row.desired_state is DesiredState.DELETED:
        raise applying.being_deleted("instance", row.id)
    concurrency.require_current_version("instance", row.version, if_match)
    found = _differences(row, request)
    result = applying.compared(row, found, CHANGEABLE)
    if found:
        instances.require_changeable(session, access, row, {each.field for each in found})
    if result.outcome is ApplyOutcome.CHANGED:
        asked = _asked(row, request)
        instances.change(session, access, row, {each.field: asked[each.field] for each in found}, if_match)
    return result


def _differences(row: Instance, request: InstanceApply) -> tuple[JsonDifference, ...]:
    return differences(_stored(row), _asked(row, request))


def _stored(row: Instance) -> Json:
    spec = instances.spec_of(row).model_dump(mode="json")
    return {"name": row.name, "project_id": row.project_id, "labels": row.labels, **spec}


def _asked(row: Instance, request: InstanceApply) -> Json:
    return {
        "name": request.name or row.name,
        "project_id": request.project_id or row.project_id,
        "labels": request.labels,
        **request.spec(),
    }
