"""What a node reports of an instance, and the state that follows."""

from enum import StrEnum

from mooring.core.instance.state import DesiredState, State


class Phase(StrEnum):
    """What a node sees of one attempt of an instance."""

    ABSENT = "absent"  # the node knows of it and has no container for it
    STARTING = "starting"  # pulling, creating, or waiting to restart
    RUNNING = "running"
    EXITED = "exited"  # the container is there and its process has ended
    REFUSED = "refused"  # it could not be started; nothing of it is left


def after_report(
    state: State, desired: DesiredState, phase: Phase, exit_code: int | None, began: bool
) -> State:
    """The state that a node's report of this attempt leads to.

    Args:
        began: whether the node has said before that this attempt was running. Only then is an absent
            container a loss; before, the node simply has not got to it.
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
        # Its node speaks again and is about to start it.
        return State.STARTING if state is State.UNREACHABLE else state
    return State.FAILED


def _after_report_when_stopping(desired: DesiredState, phase: Phase) -> State:
    if phase in {Phase.STARTING, Phase.RUNNING}:
        return State.STOPPING
    if desired is DesiredState.STOPPED:
        return State.STOPPED
    # A delete ends only when nothing is left, an exited container included.
    return State.STOPPING if phase is Phase.EXITED else State.DELETED
