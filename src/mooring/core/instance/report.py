"""What a node reports about an instance, and the state that follows."""

from enum import StrEnum

from mooring.core.instance.state import DesiredState, State


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
            container mean that it was lost; otherwise the node has not created it yet.
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
        # The node is reachable again and is about to start it.
        return State.STARTING if state is State.UNREACHABLE else state
    return State.FAILED


def _after_report_when_stopping(desired: DesiredState, phase: Phase) -> State:
    if phase in {Phase.STARTING, Phase.RUNNING}:
        return State.STOPPING
    if desired is DesiredState.STOPPED:
        return State.STOPPED
    # A delete ends only when even the exited container is gone.
    return State.STOPPING if phase is Phase.EXITED else State.DELETED
