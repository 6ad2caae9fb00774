"""The lifecycle of an instance: states, transitions, and the reason for a state.

    pending -> scheduled -> starting -> running -> stopping -> stopped
       |           |            |          |  \\
       |           |            |          |   `-> succeeded (exit 0) | failed (other exit, with a reason)
       `-----------+------------+----------+--> failed;  unreachable <-> any that holds GPUs (node silent)
    start: stopped | succeeded | failed -> pending.   delete: any -> (stopping ->) deleted
"""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from mooring.core.text import printable


class State(StrEnum):
    """State of an instance. `deleted` appears only in events and in the last response of a wait."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    DELETED = "deleted"


class DesiredState(StrEnum):
    """What the user wants. Only API operations and deadlines write it."""

    RUNNING = "running"
    STOPPED = "stopped"
    DELETED = "deleted"


HOLDS_GPUS = frozenset({State.SCHEDULED, State.STARTING, State.RUNNING, State.STOPPING, State.UNREACHABLE})
ENDED = frozenset({State.STOPPED, State.SUCCEEDED, State.FAILED})

_FINAL = {State.STOPPED, State.SUCCEEDED, State.FAILED, State.DELETED}
TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.SCHEDULED, State.STOPPED, State.FAILED, State.DELETED}),
    # scheduled -> stopping: stopped before the node's first report.
    State.SCHEDULED: frozenset({State.STARTING, State.RUNNING, State.STOPPING, State.UNREACHABLE, *_FINAL}),
    # starting -> scheduled and running -> scheduled: a restart is a new attempt on the same GPUs.
    State.STARTING: frozenset({State.SCHEDULED, State.RUNNING, State.STOPPING, State.UNREACHABLE, *_FINAL}),
    # running -> starting: the agent restarts an exited container under `restart: on_failure | always`.
    State.RUNNING: frozenset({State.SCHEDULED, State.STARTING, State.STOPPING, State.UNREACHABLE, *_FINAL}),
    State.STOPPING: frozenset({State.UNREACHABLE, *_FINAL}),
    State.UNREACHABLE: frozenset({State.STARTING, State.RUNNING, State.STOPPING, *_FINAL}),
    State.STOPPED: frozenset({State.PENDING, State.DELETED}),
    State.SUCCEEDED: frozenset({State.PENDING, State.DELETED}),
    State.FAILED: frozenset({State.PENDING, State.DELETED}),
    State.DELETED: frozenset(),
}


def actions(state: State) -> list[str]:
    """Operations that a user can call in this state, shown as `actions`."""
    if state in ENDED:
        return ["start", "delete"]
    if state in {State.SCHEDULED, State.STARTING, State.RUNNING}:
        return ["stop", "restart", "delete"]
    if state is State.DELETED:
        return []
    return ["stop", "delete"]


class Reason(BaseModel):
    """Why an instance is in its state: a stable `code` (docs/errors.md) and a sentence for humans."""

    model_config = ConfigDict(frozen=True)

    code: Annotated[str, AfterValidator(printable)]
    message: Annotated[str, AfterValidator(printable)]
