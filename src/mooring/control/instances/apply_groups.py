"""Applying instance groups by name. No field of a group can be changed."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control import applying, concurrency
from mooring.control.applying import ApplyResult
from mooring.control.instances import instance_groups
from mooring.core.access import Access
from mooring.core.json_differences import differences
from mooring.db.tables import InstanceGroup, Project
from mooring.db.types import JsonObject
from mooring_client.schemas.base import Json
from mooring_client.schemas.instance_groups import InstanceGroupApply
from mooring_client.schemas.spec import InstanceSpec
from mooring_client.schemas.states import DesiredState


def apply_by_name(
    session: Session,
    access: Access,
    project: Project,
    name: str,
    request: InstanceGroupApply,
    if_match: int | None,
) -> ApplyResult[InstanceGroup]:
    """Create the group of this name, or compare it; an ended one keeps its name until it is deleted.

    Raises:
        NameTaken, Conflict: another request was faster; the whole transaction can be repeated.
        BeingDeleted: the group of this name still exists, but not for long.
        MooringError: as `instance_groups.create`.
    """
    named = request.model_copy(update={"name": name})
    query = select(InstanceGroup).where(InstanceGroup.project_id == project.id, InstanceGroup.name == name)
    row = session.scalar(query.where(InstanceGroup.deleted_at.is_(None)))
    if row is None or instance_groups.is_gone(session, row):
        applying.require_no_version("instance group", name, if_match)
        return applying.created(instance_groups.create(session, access, project, named))
    if row.desired_state is DesiredState.DELETED:
        raise applying.being_deleted("instance group", row.id)
    version = instance_groups.shown_version(row, instance_groups.members(session, row))
    concurrency.require_current_version("instance group", version, if_match)
    return applying.compared(row, differences(_stored(row, request), _asked(request)))


def _asked(request: InstanceGroupApply) -> Json:
    return {
        "labels": request.labels,
        "count": request.count,
        "template": instance_groups.template_of(request),
        "on_member_failure": request.on_member_failure,
        "network": request.network.model_dump(mode="json"),
        "master_port": request.master_port,
    }


def _stored(row: InstanceGroup, request: InstanceGroupApply) -> Json:
    return {
        "labels": row.labels,
        "count": row.count,
        "template": _template(row.template, request),
        "on_member_failure": row.on_member_failure,
        "network": {"mode": row.network, "encrypted": row.encrypted},
        "master_port": row.master_port,
    }


def _template(stored: JsonObject, request: InstanceGroupApply) -> Json:
    # Earlier releases did not store the template's labels: nobody knows whether they differ.
    labels = stored.get("labels", request.template.labels)
    return {**InstanceSpec.from_row(stored).model_dump(mode="json"), "labels": labels}
