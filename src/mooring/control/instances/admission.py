"""Admission: names of instances, and the rules of a project that are checked before each start."""

import re
from collections.abc import Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session
from ulid import ULID

from mooring.control.instances import placement_rules
from mooring.control.tenants import registry_rules, secrets
from mooring.control.volumes import mounts
from mooring.core.access import Access
from mooring.core.images import is_allowed
from mooring.db.tables import Instance, Project
from mooring_client.errors import (
    GpuSharingNotAllowed,
    ImageNotAllowed,
    NameTaken,
    PriorityNotAllowed,
    PublicPortsNotAllowed,
    TooManyPorts,
)
from mooring_client.schemas.spec import WHOLE_MILLI, InstanceSpec

MAX_PORTS: Final = 8


def generated_name(image: str) -> str:
    """A name made from the image, for an instance without one."""
    repository = image.split("@", maxsplit=1)[0].rsplit("/", 1)[-1].split(":", maxsplit=1)[0].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", repository).strip("-")[:48]
    return f"{stem}-{str(ULID())[-8:].lower()}"


def require_free_names(session: Session, project_id: str, names: Sequence[str]) -> None:
    """Raises NameTaken if a live instance of the project has one of these names."""
    # The unique index decides; this check gives the common case a clear error.
    query = select(Instance.name).where(Instance.project_id == project_id, Instance.name.in_(names))
    taken = session.scalar(query.where(Instance.deleted_at.is_(None)).order_by(Instance.name).limit(1))
    if taken is not None:
        raise NameTaken(f"an instance named {taken} exists; delete it or choose another name", name=taken)


def require_priority(session: Session, access: Access, project_id: str, priority: int) -> None:
    """Raises PriorityNotAllowed if it is above the project's `max_priority` and the caller is no admin."""
    most = session.get_one(Project, project_id).max_priority
    if most is None or priority <= most or access.caller.is_admin:
        return
    raise PriorityNotAllowed(
        f"this project may ask for a priority of {most} at most; ask an admin for more",
        priority=priority,
        max_priority=most,
    )


def require(session: Session, project_id: str, spec: InstanceSpec) -> None:
    """Check that the project may start this spec.

    Raises:
        Forbidden: codes `image_not_allowed`: no pattern of the project matches the image (R15);
            `gpu_sharing_not_allowed`: it requests a share of a GPU, and the project may not share GPUs;
            `public_ports_not_allowed`: it has a public port, and the project may not have such;
            `node_selector_conflict`: its node selector contradicts the project's.
        Invalid: codes `too_many_ports`, `registry_not_allowed`, and those of `secrets.require`.
        MooringError: as `mounts.require`.
    """
    _require_allowed_image(session, project_id, spec.image)
    registry_rules.require_image(session, project_id, spec.image)
    _require_few_ports(spec)
    _require_public_ports_allowed(session, project_id, spec)
    if spec.gpus.milli < WHOLE_MILLI and spec.gpus.mig_profile is None:
        _require_sharing_allowed(session, project_id)
    placement_rules.require_no_conflict(session, project_id, spec.node_selector)
    secrets.require(session, project_id, spec)
    mounts.require(session, project_id, spec)


def _require_few_ports(spec: InstanceSpec) -> None:
    # Docker runs two processes for each published port, outside of the instance's own limits.
    published = sum(port.expose == "node" for port in spec.ports)
    if published > MAX_PORTS:
        raise TooManyPorts(
            f"an instance may publish {MAX_PORTS} ports, this one has {published}; set `expose` of the "
            "others to `proxy`, or run a proxy in the container",
        )


def _require_public_ports_allowed(session: Session, project_id: str, spec: InstanceSpec) -> None:
    public = [port.container for port in spec.ports if port.auth == "public"]
    if public and not session.get_one(Project, project_id).public_ports:
        raise PublicPortsNotAllowed(
            f"this project may not make port {public[0]} public; use auth `private` or `token`, or ask an "
            "admin to set `public_ports` of the project",
            port=public[0],
        )


def _require_sharing_allowed(session: Session, project_id: str) -> None:
    if not session.get_one(Project, project_id).gpu_sharing:
        raise GpuSharingNotAllowed(
            "this project may not share GPUs; ask for whole ones, or ask an admin to allow it"
        )


def _require_allowed_image(session: Session, project_id: str, image: str) -> None:
    allowed = session.get_one(Project, project_id).allowed_images
    if allowed is None or is_allowed(image, allowed):
        return
    listed = ", ".join(allowed) or "none at all"
    raise ImageNotAllowed(
        f"this project may not run {image}; it may run {listed}. Admins can allow more",
        image=image,
        allowed=allowed,
    )
