"""The state of a group follows from its members."""

import pytest

from mooring.core.group import GroupState, group_state
from mooring.core.instance.state import DesiredState, State

WANTED, STOPPED, DELETED = DesiredState.RUNNING, DesiredState.STOPPED, DesiredState.DELETED


@pytest.mark.parametrize(
    ("members", "desired", "state"),
    [
        ("pending pending", WANTED, "pending"),
        ("scheduled pending", WANTED, "starting"),
        ("scheduled starting", WANTED, "starting"),
        ("running starting", WANTED, "starting"),
        ("running running", WANTED, "running"),
        ("running succeeded", WANTED, "running"),
        ("running pending", WANTED, "starting"),  # one is restarted
        ("running unreachable", WANTED, "unreachable"),
        ("running stopping", WANTED, "stopping"),
        ("running failed", WANTED, "starting"),  # until it is restarted, or the group has failed
        ("succeeded succeeded", WANTED, "succeeded"),
        ("succeeded failed", WANTED, "failed"),
        ("succeeded stopped", WANTED, "stopped"),
        ("stopping stopped", STOPPED, "stopping"),
        ("pending stopped", STOPPED, "stopping"),
        ("stopped stopped", STOPPED, "stopped"),
        ("stopped succeeded", STOPPED, "stopped"),
        ("stopping deleted", DELETED, "stopping"),
        ("stopped deleted", DELETED, "stopped"),
        ("deleted deleted", DELETED, "stopped"),
    ],
)
def test_the_state_follows_from_its_members(members: str, desired: DesiredState, state: str) -> None:
    assert group_state([State(each) for each in members.split()], desired, failed=False) == GroupState(state)


@pytest.mark.parametrize(
    ("members", "state"), [("stopping failed", "stopping"), ("stopped failed", "failed")]
)
def test_a_member_failure_fails_the_group_once_it_is_recorded(members: str, state: str) -> None:
    assert group_state([State(each) for each in members.split()], STOPPED, failed=True) == GroupState(state)
