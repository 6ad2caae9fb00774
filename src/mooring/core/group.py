"""Instance groups: their state, derived from the states of the members, and the names of members."""

from collections.abc import Collection
from typing import Final

from mooring.core.instance.state import ENDED
from mooring_client.schemas.instance_groups import GroupState
from mooring_client.schemas.states import DesiredState, State

GROUP_ENDED: Final = frozenset({GroupState.STOPPED, GroupState.SUCCEEDED, GroupState.FAILED})


def group_state(members: Collection[State], desired: DesiredState, *, failed: bool) -> GroupState:
    """The state of a group.

    Args:
        failed: a member's failure made the group fail.
    """
    remaining = [state for state in members if state is not State.DELETED]
    if all(state in ENDED for state in remaining):
        return _ended(remaining, desired, failed=failed)
    if desired is not DesiredState.RUNNING or failed:
        return GroupState.STOPPING
    if State.UNREACHABLE in remaining:
        return GroupState.UNREACHABLE
    if all(state is State.PENDING for state in remaining):
        return GroupState.PENDING
    if all(state in {State.RUNNING, State.SUCCEEDED} for state in remaining):
        return GroupState.RUNNING
    return GroupState.STOPPING if State.STOPPING in remaining else GroupState.STARTING


def _ended(remaining: Collection[State], desired: DesiredState, *, failed: bool) -> GroupState:
    if failed or (desired is DesiredState.RUNNING and State.FAILED in remaining):
        return GroupState.FAILED
    if remaining and all(state is State.SUCCEEDED for state in remaining):
        return GroupState.SUCCEEDED
    return GroupState.STOPPED


def group_actions(state: GroupState, desired: DesiredState) -> list[str]:
    """The operations that a user may call on a group in this state."""
    if desired is DesiredState.DELETED:
        return ["delete"]
    return ["start", "delete"] if state in GROUP_ENDED else ["stop", "delete"]


def member_name(group: str, rank: int) -> str:
    """The name of a member, which is also its name in the group's network."""
    return f"{group}-{rank}"


def overlay_name(group_id: str) -> str:
    """The name of the network that a group's members share over several nodes."""
    return f"mooring-{group_id}"
