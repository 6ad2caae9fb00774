"""Which XIDs are a program's fault."""

import pytest

from mooring.core.xid import verdict


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_a_program_can_cause_these(xid: int) -> None:
    assert verdict(xid) == "application"


@pytest.mark.parametrize("xid", [0, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 154, 999_999])
def test_everything_else_is_the_hardware_until_proven_otherwise(xid: int) -> None:
    assert verdict(xid) == "hardware"


def test_an_operator_can_have_a_table_of_their_own() -> None:
    assert verdict(94, frozenset({94})) == "application"
    assert verdict(31, frozenset({94})) == "hardware"
