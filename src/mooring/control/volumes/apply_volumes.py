"""Applying volumes: by id, or by name in a project."""

from typing import Final

from sqlalchemy.orm import Session

from mooring.control import applying, concurrency
from mooring.control.applying import ApplyOutcome, ApplyResult
from mooring.control.tenants import projects
from mooring.control.volumes import volumes
from mooring.core.access import Access
from mooring.core.json_differences import differences
from mooring.db.tables import Project, Volume
from mooring_client.errors import NotFound
from mooring_client.schemas.base import Json
from mooring_client.schemas.volumes import VolumeApply

_CHANGEABLE: Final = frozenset({"labels", "size_mib"})


def apply_by_name(
    session: Session, access: Access, project: Project, name: str, request: VolumeApply, if_match: int | None
) -> ApplyResult[Volume]:
    """Create or change the volume of this name. One that is being deleted does not count.

    Raises:
        NameTaken, Conflict: another request was faster; the whole transaction can be repeated.
        MooringError: as `volumes.create` and `volumes.patch`.
    """
    row = volumes.find(session, project.id, name)
    if row is None:
        applying.require_no_version("volume", name, if_match)
        return applying.created(volumes.create(session, access, project, name, request))
    try:
        return apply(session, access, row.id, request, if_match)
    except NotFound:
        raise applying.changed_meanwhile("volume", name) from None


def apply(
    session: Session, access: Access, volume_id: str, request: VolumeApply, if_match: int | None
) -> ApplyResult[Volume]:
    """Change the volume to what is requested. An omitted name or project stays as it is.

    Raises:
        MooringError: as `volumes.patch`.
    """
    row = volumes.get(session, access, volume_id)
    project = projects.locked(session, access, row.project_id)
    row = volumes.locked(session, access, volume_id)
    concurrency.require_current_version("volume", row.version, if_match)
    asked = _asked(row, request)
    result = applying.compared(row, differences(_stored(row), asked), _CHANGEABLE)
    if result.outcome is ApplyOutcome.CHANGED:
        changes = {each.field: asked[each.field] for each in result.differences}
        volumes.change(session, access, project, row, changes)
    return result


def _stored(row: Volume) -> Json:
    return {
        "name": row.name,
        "project_id": row.project_id,
        "labels": row.labels,
        "driver": row.driver,
        "size_mib": row.size_mib,
        "options": row.options,
        "node_selector": row.node_selector,
    }


def _asked(row: Volume, request: VolumeApply) -> Json:
    return {
        "name": request.name or row.name,
        "project_id": request.project_id or row.project_id,
        "labels": request.labels,
        "driver": request.driver,
        "size_mib": request.size,
        "options": request.options.model_dump(exclude_none=True),
        "node_selector": request.node_selector,
    }
