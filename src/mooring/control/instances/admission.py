"""What a project's rules say of an instance before each of its starts."""

from typing import Final

from sqlalchemy.orm import Session

from mooring.control.instances import placement_rules
from mooring.control.tenants import registry_rules, secrets
from mooring.core.access import Access
from mooring.core.errors import Forbidden, Invalid
from mooring.core.images import is_allowed
from mooring.core.instance.spec import WHOLE_MILLI, InstanceSpec
from mooring.db.tables import Project

MOST_PORTS: Final = 8


def require_priority(session: Session, access: Access, project_id: str, priority: int) -> None:
    """Raises Forbidden, code `priority_not_allowed`: it is above what the project may ask for."""
    most = session.get_one(Project, project_id).max_priority
    if most is None or priority <= most or access.caller.is_admin:
        return
    raise Forbidden(
        f"this project may ask for a priority of {most} at most; ask an admin for more",
        code="priority_not_allowed",
        priority=priority,
        max_priority=most,
    )


def require(session: Session, project_id: str, spec: InstanceSpec) -> None:
    """Let a start pass that the project may have.

    Raises:
        Forbidden: code `image_not_allowed`: none of the project's patterns names the image (R15);
            `gpu_sharing_not_allowed`: it asks for a share of a GPU, which admins have not allowed.
            `node_selector_conflict`: it asks for other nodes than those of its project.
        Invalid: codes `too_many_ports`, `registry_not_allowed`; its secrets, as `secrets.require`.
    """
    _require_allowed(session, project_id, spec.image)
    registry_rules.require_image(session, project_id, spec.image)
    _require_few_ports(spec)
    if spec.gpus.milli < WHOLE_MILLI and spec.gpus.mig_profile is None:
        _require_sharing(session, project_id)
    placement_rules.require_no_conflict(session, project_id, spec.node_selector)
    secrets.require(session, project_id, spec)


def _require_few_ports(spec: InstanceSpec) -> None:
    # Docker runs two processes for each published port, outside of the instance's own limits.
    if len(spec.ports) > MOST_PORTS:
        raise Invalid(
            f"an instance may publish {MOST_PORTS} ports, this one names {len(spec.ports)}; put a proxy into "
            "the container for more",
            code="too_many_ports",
        )


def _require_sharing(session: Session, project_id: str) -> None:
    if not session.get_one(Project, project_id).gpu_sharing:
        raise Forbidden(
            "this project may not share GPUs; ask for whole ones, or ask an admin to allow it",
            code="gpu_sharing_not_allowed",
        )


def _require_allowed(session: Session, project_id: str, image: str) -> None:
    allowed = session.get_one(Project, project_id).allowed_images
    if allowed is None or is_allowed(image, allowed):
        return
    listed = ", ".join(allowed) or "none at all"
    raise Forbidden(
        f"this project may not run {image}; it may run {listed}. Admins can allow more",
        code="image_not_allowed",
        image=image,
        allowed=allowed,
    )
