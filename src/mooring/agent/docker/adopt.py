"""The container of an assignment: created and recorded, or what an earlier call left under its name.

    create -> record on disk -> (the caller starts it)

So a container that runs without a record was not started by this release.
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
    message="The node cannot write down what the container is given (its disk is full?); it is tried again",
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
    """The container's id and status.

    Raises:
        StartRefused: it cannot be created, or its name is held by something else, which is left alone.
        StartDelayed: it cannot be recorded; what was created is removed.
        RuntimeUnavailable: it is just being created, or removed.
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
    """What an earlier call left under this name: one that timed out, or an agent that was killed."""
    found = engine.container(name)
    labels = found["Config"]["Labels"] or {}
    if not is_ours(labels, control_plane_id) or labels.get(SPEC) != spec_hash(assignment):
        message = f"a container named {name} is on the node already and is not this instance's"
        raise StartRefused(Reason(code="container_name_taken", message=message))
    log.info("adopted container %s, %s", name, found["State"]["Status"])
    return found["Id"], found["State"]["Status"]


def _remove(engine: Engine, container_id: str) -> None:
    try:
        engine.remove(container_id, force=True)
    except EngineRefused as refusal:
        if not is_gone(refusal):
            raise
