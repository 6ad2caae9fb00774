"""The allocatable part of a node, the state that is shown, and the validation of facts."""

from itertools import product

import pytest
from pydantic import ValidationError

from mooring.core.node import NodeFacts, allocatable_memory_mib, proportional, state_of
from mooring_client.schemas.nodes import NodeState


def test_the_worst_state_is_shown() -> None:
    for silent, problem, draining, cordoned in product((True, False), repeat=4):
        shown = state_of(silent=silent, problem=problem, draining=draining, cordoned=cordoned)
        if silent:
            assert shown is NodeState.UNREACHABLE
        elif problem:
            assert shown is NodeState.NOT_READY
        elif draining:
            assert shown is NodeState.DRAINING
        else:
            assert shown is (NodeState.CORDONED if cordoned else NodeState.READY)


@pytest.mark.parametrize(
    ("memory", "reserved"),
    [(1, 0), (600, 300), (1024, 512), (25_600, 512), (51_200, 1024), (524_288, 10_485)],
)
def test_some_memory_is_reserved_for_the_system(memory: int, reserved: int) -> None:
    assert allocatable_memory_mib(memory) == memory - reserved


@pytest.mark.parametrize("total", [1, 7, 64, 513_803])
@pytest.mark.parametrize("gpus", [1, 3, 8, 16])
def test_the_parts_of_all_gpus_never_exceed_the_total(total: int, gpus: int) -> None:
    assert proportional(total, 1, gpus) * gpus <= total
    assert proportional(total, gpus, gpus) == total


@pytest.mark.parametrize(
    "fields", [{"cpus": 0}, {"cpus": 2**40}, {"memory_mib": 0}, {"memory_mib": 2**31}, {"hostname": "a\x00"}]
)
def test_impossible_facts_are_rejected(fields: dict[str, object]) -> None:
    good = {"hostname": "a", "address": "a", "cpus": 1, "memory_mib": 1, "agent_version": "1"}
    NodeFacts.model_validate(good)
    with pytest.raises(ValidationError):
        NodeFacts.model_validate(good | fields)
