"""Creates and records the container of an assignment, or adopts the one that an earlier call created.

    create -> record on disk -> (the caller starts the container)

So a running container has no record only if an earlier release started it, or if the records were lost.
"""

import logging

from mooring.agent.docker import hostfile
from mooring.agent.docker.client import Document, Engine, remove_container
from mooring.agent.docker.container_records import ContainerRecord, TooManyContainersError
from mooring.agent.docker.create import SPEC_LABEL, Image, command_line, container_name, spec_hash
from mooring.agent.docker.derive import is_ours
from mooring.agent.docker.errors import EngineRefused, start_failure
from mooring.agent.docker.observe import Observer
from mooring.agent.docker.toolbox_mount import toolbox_of
from mooring.agent.docker.toolbox_volumes import has_files
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed, StartRefused
from mooring.schemas.agent import Assignment
from mooring_client.schemas.states import Reason

NOT_RECORDED = Reason(
    code="state_not_saved",
    message="the node cannot record the container, perhaps because its disk is full; the start is retried",
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
        StartRefused: the container cannot be created, or a foreign one, which is left alone, has its name.
        StartDelayed: the container cannot be recorded; if this call created it, it is removed.
        RuntimeUnavailable: the engine does not answer, another call is creating or removing the container,
            or the toolbox was removed.
    """
    name = container_name(assignment.instance_id, assignment.attempt)
    try:
        container_id, status = _create(engine, config, name), "created"
    except EngineRefused as refusal:
        if refusal.status != 409:
            reason = start_failure(refusal.message, command_line(assignment.spec, image))
            raise StartRefused(reason) from refusal
        container_id, status = _adopt(engine, assignment, name, control_plane_id)
    if status == "created":
        hostfile.write(engine, container_id, assignment)
    try:
        observer.remember(container_id, ContainerRecord.of(assignment, image.digest, control_plane_id))
    except (OSError, TooManyContainersError) as error:
        log.warning("container %s is not recorded: %r", name, error)
        if status == "created":
            remove_container(engine, container_id, force=True)
        raise StartDelayed(NOT_RECORDED) from error
    return container_id, status


def _create(engine: Engine, config: Document, name: str) -> str:
    container_id = engine.create(config, name)
    toolbox = toolbox_of(config["HostConfig"])
    if toolbox is not None and not has_files(engine, toolbox):
        remove_container(engine, container_id, force=True)
        raise RuntimeUnavailable(f"the toolbox {toolbox} was removed during a start")
    return container_id


def _adopt(engine: Engine, assignment: Assignment, name: str, control_plane_id: str) -> tuple[str, str]:
    """Return the id and status of the container that an earlier call created."""
    found = engine.container(name)
    labels = found["Config"]["Labels"] or {}
    if not is_ours(labels, control_plane_id) or labels.get(SPEC_LABEL) != spec_hash(assignment):
        message = f"the node has a container named {name} that does not belong to this instance"
        raise StartRefused(Reason(code="container_name_taken", message=message))
    log.info("adopted container %s, which is %s", name, found["State"]["Status"])
    return found["Id"], found["State"]["Status"]
