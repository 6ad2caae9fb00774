"""The hostfile of a member of a group, for launchers such as DeepSpeed and MPI."""

import logging

from mooring.agent.docker.client import Engine
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.toolbox.archive import Content, packed
from mooring.schemas.agent import HOSTFILE, Assignment

log = logging.getLogger(__name__)


def write(engine: Engine, container_id: str, assignment: Assignment) -> None:
    """Write the hostfile into a container that has not started. Not all programs need it.

    So an image that has no place for it, such as one with a file at `/job`, starts without.

    Raises:
        RuntimeUnavailable: the engine does not answer.
    """
    group = assignment.group
    if group is None or not group.hostfile:
        return
    folder, _, name = HOSTFILE.rpartition("/")
    try:
        engine.put_archive(container_id, packed({name: Content(group.hostfile.encode())}, folder))
    except EngineRefused as refusal:
        log.warning("%s has no hostfile: %s", assignment.name, refusal.message)
