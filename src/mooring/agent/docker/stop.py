"""Signals to containers, sent without waiting for what they lead to.

The engine's own stop is not used: it holds its caller until the end, for as long as the user allows, and
forgets the SIGKILL that should follow when it is restarted. When that is due is decided in reconcile.py.
"""

import logging
from typing import Final

from mooring.agent.docker.client import Engine, is_gone
from mooring.agent.docker.errors import EngineRefused
from mooring.agent.runtime import RuntimeUnavailable

STOP_SIGNAL: Final = "SIGTERM"  # unless the container's configuration names another
_NO_SUCH_SIGNAL: Final = 400
_NOT_RUNNING: Final = 409

log = logging.getLogger(__name__)


def begin_stop(engine: Engine, container_id: str) -> bool:
    """Send the container's stop signal; False: it has ended, or is gone."""
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
    """Send a signal; False: the container has ended, or is gone."""
    try:
        engine.kill(container_id, signal)
    except EngineRefused as refusal:
        return _has_ended(refusal)
    return True


def kill_all(engine: Engine, container_id: str) -> None:
    """Send SIGKILL, and see to it that the container's processes get the CPU time that they need to end.

    A killed process ends when the kernel runs it next. A fork bomb has used minutes of CPU time in advance,
    and under the container's limit none of its processes runs before that is paid back; until then the engine
    does not answer. A new limit, here all CPUs of the machine, clears the debt. What was killed executes none
    of its own code.
    """
    try:
        kill(engine, container_id)
    except EngineRefused:
        raise
    except RuntimeUnavailable:
        engine.limit_cpus(container_id, engine.info()["NCPU"])
        log.warning("container %s did not end when it was killed; its CPU limit is lifted", container_id)


def _has_ended(refusal: EngineRefused) -> bool:
    """False, as the answer of who asks; raises what says something else than that."""
    if is_gone(refusal) or refusal.status == _NOT_RUNNING:
        return False
    raise refusal
