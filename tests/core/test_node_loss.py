"""When so many nodes went silent at once that nothing is replaced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.core.node_loss import is_outage, self_fence_s

WINDOW_S = 300.0


@pytest.mark.parametrize(
    ("silent_since", "nodes", "expected"),
    [
        ([], 0, False),
        ([0], 1, False),  # one node is no outage
        ([0], 2, False),
        ([0, 300], 2, True),
        ([0, 301], 2, False),  # one after the other
        ([0, 10], 4, True),  # half of them
        ([0, 10], 5, False),
        ([0, 10, 20], 5, True),
        ([0, 10, 20], 6, True),
        ([0, 10, 320], 6, False),
        ([0, 1000, 1010, 1020], 6, True),  # one has been silent for long
        ([20, 0, 10], 5, True),  # in any order
    ],
)
def test_half_of_the_nodes_at_once_is_an_outage(
    silent_since: list[float], nodes: int, expected: bool
) -> None:
    assert is_outage(silent_since, nodes, WINDOW_S) is expected


@given(st.lists(st.floats(0, 10_000), max_size=20), st.integers(0, 30))
def test_an_outage_is_a_window_with_enough_nodes(silent_since: list[float], more: int) -> None:
    nodes = len(silent_since) + more
    most = max(
        (sum(0 <= other - first <= WINDOW_S for other in silent_since) for first in silent_since), default=0
    )
    assert is_outage(silent_since, nodes, WINDOW_S) is (most >= 2 and 2 * most >= nodes)


def test_a_node_fences_itself_in_time() -> None:
    assert self_fence_s(300) == 240
