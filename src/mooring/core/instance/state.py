"""The lifecycle of an instance: states, their reasons, and the state that follows from a node's report.

The usual transitions (`TRANSITIONS` has all):

    pending -> scheduled -> starting -> running -> stopping -> stopped
       |           |            |          |  \\
       |           |            |          |   `-> succeeded (exit 0) | failed (other exit, with a reason)
       `-----------+------------+----------+--> failed;  unreachable <-> states that hold GPUs (node silent)
    start: stopped | succeeded | failed -> pending.   delete: any -> (stopping ->) deleted
"""

from enum import StrEnum

from mooring_client.schemas.states import DesiredState, State

HOLDS_GPUS = frozenset({State.SCHEDULED, State.STARTING, State.RUNNING, State.STOPPING, State.UNREACHABLE})
ENDED = frozenset({State.STOPPED, State.SUCCEEDED, State.FAILED})

_FINAL = ENDED | {State.DELETED}
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


class Phase(StrEnum):
    """What a node observes of one attempt of an instance."""

    ABSENT = "absent"  # the node knows the attempt and has no container for it
    STARTING = "starting"  # pulling, creating, or waiting to restart
    RUNNING = "running"
    EXITED = "exited"  # the container exists and its process has ended
    REFUSED = "refused"  # the start failed; nothing of it is left on the node


def after_report(
    state: State, desired: DesiredState, phase: Phase, exit_code: int | None, began: bool
) -> State:
    """Return the state that follows from a node's report of this attempt.

    Args:
        began: whether the node has reported this attempt as running before. Only then does an absent
            container mean that the container was lost; otherwise the node has not created it yet.
    """
    if desired is not DesiredState.RUNNING:
        return _after_report_when_stopping(desired, phase)
    if phase is Phase.STARTING:
        return State.STARTING
    if phase is Phase.RUNNING:
        return State.RUNNING
    if phase is Phase.EXITED:
        return State.SUCCEEDED if exit_code == 0 else State.FAILED
    if phase is Phase.ABSENT and not began:
        # The node is reachable again and is about to start the attempt.
        return State.STARTING if state is State.UNREACHABLE else state
    return State.FAILED


def _after_report_when_stopping(desired: DesiredState, phase: Phase) -> State:
    if phase in {Phase.STARTING, Phase.RUNNING}:
        return State.STOPPING
    if desired is DesiredState.STOPPED:
        return State.STOPPED
    # A delete ends only when even the exited container is gone.
    return State.STOPPING if phase is Phase.EXITED else State.DELETED
