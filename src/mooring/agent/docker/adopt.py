"""Creates and records the container of an assignment, or adopts the one that an earlier call created.

    create -> record on disk -> (the caller starts it)

A running container without a record was therefore started by an earlier release.
"""

import logging

from mooring.agent.docker.client import Document, Engine, is_gone
from mooring.agent.docker.container_records import ContainerRecord, TooManyContainersError
from mooring.agent.docker.create import SPEC, Image, command_line, container_name, spec_hash
from mooring.agent.docker.derive import is_ours
from mooring.agent.docker.errors import EngineRefused, start_failure
from mooring.agent.docker.observe import Observer
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment

NOT_RECORDED = Reason(
    code="state_not_saved",
    message="The node cannot save the record of the container, perhaps because its disk is full; it retries",
)

log = logging.getLogger(__name__)


def create_or_adopt(
    engine: Engine,
    observer: Observer,
    assignment: Assignment,
    image: Image,
    config: Document,
    control_plane_id: str,
) -> tuple[str, str]:
    """Return the container's id and status.

    Raises:
        StartRefused: it cannot be created, or a foreign container, which is left alone, has its name.
        StartDelayed: it cannot be recorded; if this call created it, it is removed.
        RuntimeUnavailable: another call is creating or removing it.
    """
    name = container_name(assignment.instance_id, assignment.attempt)
    try:
        container_id, status = engine.create(config, name), "created"
    except EngineRefused as refusal:
        if refusal.status != 409:
            reason = start_failure(refusal.message, command_line(assignment.spec, image))
            raise StartRefused(reason) from refusal
        container_id, status = _adopted(engine, assignment, name, control_plane_id)
    try:
        observer.remember(container_id, ContainerRecord.of(assignment, image.digest, control_plane_id))
    except (OSError, TooManyContainersError) as error:
        log.warning("container %s is not recorded: %r", name, error)
        if status == "created":
            _remove(engine, container_id)
        raise StartDelayed(NOT_RECORDED) from error
    return container_id, status


def _adopted(engine: Engine, assignment: Assignment, name: str, control_plane_id: str) -> tuple[str, str]:
    """Adopt the container of a call that timed out, or of an agent that was killed."""
    found = engine.container(name)
    labels = found["Config"]["Labels"] or {}
    if not is_ours(labels, control_plane_id) or labels.get(SPEC) != spec_hash(assignment):
        message = f"the node has a container named {name} that does not belong to this instance"
        raise StartRefused(Reason(code="container_name_taken", message=message))
    log.info("adopted container %s, %s", name, found["State"]["Status"])
    return found["Id"], found["State"]["Status"]


def _remove(engine: Engine, container_id: str) -> None:
    try:
        engine.remove(container_id, force=True)
    except EngineRefused as refusal:
        if not is_gone(refusal):
            raise
