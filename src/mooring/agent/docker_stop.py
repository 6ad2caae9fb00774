"""Signals to containers, sent without waiting for what they lead to.

The engine's own stop is not used: it holds its caller until the end, for as long as the user allows, and
forgets the SIGKILL that should follow when it is restarted. When that is due is decided in reconcile.py.
"""

from typing import Final

from mooring.agent.docker_engine import Engine, is_gone
from mooring.agent.docker_errors import EngineRefused

STOP_SIGNAL: Final = "SIGTERM"  # unless the container's configuration names another
_NO_SUCH_SIGNAL: Final = 400
_NOT_RUNNING: Final = 409


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


def _has_ended(refusal: EngineRefused) -> bool:
    """False, as the answer of who asks; raises what says something else than that."""
    if is_gone(refusal) or refusal.status == _NOT_RUNNING:
        return False
    raise refusal
