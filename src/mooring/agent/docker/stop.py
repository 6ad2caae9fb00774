"""Sends signals to containers without waiting for their effect.

The engine's own stop blocks its caller for the whole stop timeout, and a restart of the engine cancels the
SIGKILL that should follow. Therefore reconcile.py decides when to kill.
"""

import logging
from typing import Final

from mooring.agent.docker.client import Engine, is_gone
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.runtime import RuntimeUnavailable

STOP_SIGNAL: Final = "SIGTERM"  # unless the container's configuration has another
_NO_SUCH_SIGNAL: Final = 400
_NOT_RUNNING: Final = 409

log = logging.getLogger(__name__)


def begin_stop(engine: Engine, container_id: str) -> bool:
    """Send the container's stop signal. Return False if it has ended, or does not exist."""
    try:
        signal = engine.container(container_id)["Config"].get("StopSignal") or STOP_SIGNAL
    except EngineRefused as refusal:
        return _has_ended(refusal)
    try:
        return kill(engine, container_id, signal)
    except EngineRefused as refusal:
        if refusal.status != _NO_SUCH_SIGNAL:
            raise
        return kill(engine, container_id, STOP_SIGNAL)


def kill(engine: Engine, container_id: str, signal: str = "SIGKILL") -> bool:
    """Send a signal. Return False if the container has ended, or does not exist."""
    try:
        engine.kill(container_id, signal)
    except EngineRefused as refusal:
        return _has_ended(refusal)
    return True


def kill_all(engine: Engine, container_id: str) -> None:
    """Send SIGKILL, and raise the CPU limit if the container does not end.

    A killed process ends when the kernel next runs it. A fork bomb may have used minutes of CPU time beyond
    its limit, and the kernel runs none of its processes until that time has passed; meanwhile the engine does
    not answer. A new limit, here all CPUs of the machine, resets this. Killed processes run no more code.
    """
    try:
        kill(engine, container_id)
    except EngineRefused:
        raise
    except RuntimeUnavailable:
        engine.limit_cpus(container_id, engine.info()["NCPU"])
        log.warning("container %s did not end after SIGKILL; its CPU limit is raised", container_id)


def _has_ended(refusal: EngineRefused) -> bool:
    """Return False, for the caller to return, if the error means that; otherwise raise the error."""
    if is_gone(refusal) or refusal.status == _NOT_RUNNING:
        return False
    raise refusal
