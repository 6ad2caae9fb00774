"""The state of a group follows from its members."""

import pytest

from mooring.core.group import group_state
from mooring_client.schemas.instance_groups import GroupState
from mooring_client.schemas.states import DesiredState, State

RUNNING, STOPPED, DELETED = DesiredState.RUNNING, DesiredState.STOPPED, DesiredState.DELETED


@pytest.mark.parametrize(
    ("members", "desired", "state"),
    [
        ("pending pending", RUNNING, "pending"),
        ("scheduled pending", RUNNING, "starting"),
        ("scheduled starting", RUNNING, "starting"),
        ("running starting", RUNNING, "starting"),
        ("running running", RUNNING, "running"),
        ("running succeeded", RUNNING, "running"),
        ("running pending", RUNNING, "starting"),  # a failed member is queued again
        ("running unreachable", RUNNING, "unreachable"),
        ("running stopping", RUNNING, "stopping"),
        ("running failed", RUNNING, "starting"),  # until the member is queued again, or the group fails
        ("succeeded succeeded", RUNNING, "succeeded"),
        ("succeeded failed", RUNNING, "failed"),
        ("succeeded stopped", RUNNING, "stopped"),
        ("stopping stopped", STOPPED, "stopping"),
        ("pending stopped", STOPPED, "stopping"),
        ("stopped stopped", STOPPED, "stopped"),
        ("stopped succeeded", STOPPED, "stopped"),
        ("stopping deleted", DELETED, "stopping"),
        ("stopped deleted", DELETED, "stopped"),
        ("deleted deleted", DELETED, "stopped"),
    ],
)
def test_the_state_of_a_group_follows_from_its_members(
    members: str, desired: DesiredState, state: str
) -> None:
    assert group_state([State(each) for each in members.split()], desired, failed=False) == GroupState(state)


@pytest.mark.parametrize(
    ("members", "state"), [("stopping failed", "stopping"), ("stopped failed", "failed")]
)
def test_a_failure_of_a_member_stops_the_group_and_then_fails_it(members: str, state: str) -> None:
    assert group_state([State(each) for each in members.split()], STOPPED, failed=True) == GroupState(state)
