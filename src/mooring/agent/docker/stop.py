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
_NO_SUCH_SIGNAL: Final = 400  # status of the engine's response
_NOT_RUNNING: Final = 409

log = logging.getLogger(__name__)


def begin_stop(engine: Engine, container_id: str) -> bool:
    """Send the container's stop signal. Return False if the container has ended, or does not exist."""
    try:
        signal = engine.container(container_id)["Config"].get("StopSignal") or STOP_SIGNAL
    except EngineRefused as refusal:
        _require_ended(refusal)
        return False
    try:
        return _send(engine, container_id, signal)
    except EngineRefused as refusal:
        if refusal.status != _NO_SUCH_SIGNAL:
            raise
        return _send(engine, container_id, STOP_SIGNAL)


def _send(engine: Engine, container_id: str, signal: str) -> bool:
    """Send a signal. Return False if the container has ended, or does not exist."""
    try:
        engine.kill(container_id, signal)
    except EngineRefused as refusal:
        _require_ended(refusal)
        return False
    return True


def kill(engine: Engine, container_id: str) -> None:
    """Send SIGKILL. If the container then does not end, raise its CPU limit.

    A killed process ends when the kernel next runs it. A container may have used minutes of CPU time beyond
    its limit within system calls, such as those of a fork bomb, and the kernel runs none of its processes
    until that time has passed; meanwhile the engine does not answer. A new limit, here all CPUs of the
    machine, ends this pause. Killed processes run no more code.
    """
    try:
        _send(engine, container_id, "SIGKILL")
    except EngineRefused:
        raise
    except RuntimeUnavailable:
        engine.limit_cpus(container_id, engine.info()["NCPU"])
        log.warning("container %s did not end after SIGKILL; its CPU limit is raised", container_id)


def _require_ended(refusal: EngineRefused) -> None:
    """Raise the error unless it means that the container has ended, or does not exist."""
    if not is_gone(refusal) and refusal.status != _NOT_RUNNING:
        raise refusal
