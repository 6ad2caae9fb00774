"""Which GPUs of a node are selected."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.scheduler.model import GpuView
from mooring.scheduler.packing.links import choose
from tests.scheduler.clusters import H100, V100, Lanes, cube_mesh, gpus, no_links, pairs


def _chosen(node_gpus: tuple[GpuView, ...], count: int) -> list[int]:
    index_of = {gpu.uuid: gpu.index for gpu in node_gpus}
    return [index_of[uuid] for uuid in choose([gpu for gpu in node_gpus if gpu.free], count)]


@pytest.mark.parametrize(
    ("lanes", "in_use", "count", "expected"),
    [
        (no_links, (), 3, [0, 1, 2]),
        (lambda _a, _b: 18, (0, 3), 2, [1, 2]),  # behind a switch all are equal
        (pairs, (), 2, [0, 1]),
        (pairs, (0,), 2, [2, 3]),  # not 1 and 2, which have lower indexes and no link
        (pairs, (3,), 1, [2]),  # the unpaired one, not half of a pair
        (pairs, (1, 2, 4), 2, [6, 7]),
        (pairs, (1, 2, 4), 3, [0, 6, 7]),
        (pairs, (5,), 3, [0, 1, 4]),  # a pair and the unpaired one
        (pairs, (0, 3, 5), 3, [1, 6, 7]),
        (pairs, (), 8, list(range(8))),
    ],
)
def test_pairs(lanes: Lanes, in_use: tuple[int, ...], count: int, expected: list[int]) -> None:
    assert _chosen(gpus(H100, 8, lanes=lanes, in_use=in_use), count) == expected


@pytest.mark.parametrize(
    ("in_use", "count", "expected"),
    [
        ((), 2, [0, 3]),  # two lanes, and the six others keep most of theirs
        ((), 4, [0, 1, 2, 3]),  # a whole quad, so that the other quad stays whole
        ((0, 1, 2, 3), 2, [4, 7]),
        ((0, 4), 4, [1, 2, 3, 5]),  # no quad is whole; 5 is joined by two lanes, 6 and 7 by one
        ((5, 6, 7), 1, [4]),  # 0 to 3 stay a whole quad
    ],
)
def test_the_cube_mesh_of_a_dgx_1(in_use: tuple[int, ...], count: int, expected: list[int]) -> None:
    assert _chosen(gpus(V100, 8, lanes=cube_mesh, in_use=in_use), count) == expected


def test_without_nvlink_the_closest_on_pcie() -> None:
    node_gpus = gpus(H100, 4, topology=lambda a, b: "single" if {a, b} == {1, 3} else "system")
    assert _chosen(node_gpus, 2) == [1, 3]
    assert _chosen(node_gpus, 1) == [0]


def test_one_lane_outweighs_any_closeness() -> None:
    node_gpus = gpus(
        H100,
        4,
        lanes=lambda a, b: int({a, b} == {0, 3}),
        topology=lambda a, b: "system" if {a, b} == {0, 3} else "internal",
    )
    assert _chosen(node_gpus, 2) == [0, 3]


def test_a_link_counts_if_one_side_reports_it() -> None:
    node_gpus = gpus(H100, 4, lanes=lambda a, b: 4 if (a, b) == (3, 1) else 0)
    assert _chosen(node_gpus, 2) == [1, 3]


@given(st.permutations(gpus(V100, 8, lanes=cube_mesh)), st.integers(1, 8))
def test_the_order_of_the_list_does_not_matter(node_gpus: list[GpuView], count: int) -> None:
    assert choose(node_gpus, count) == choose(gpus(V100, 8, lanes=cube_mesh), count)


def test_no_set_is_better_connected() -> None:
    node_gpus = gpus(V100, 8, lanes=cube_mesh)
    for count in range(1, 9):
        best = max(_lanes(chosen) for chosen in combinations(range(8), count))
        assert _lanes(_chosen(node_gpus, count)) == best


@pytest.mark.parametrize("count", range(1, 16))
def test_pairs_of_sixteen_gpus_by_greedy_search(count: int) -> None:
    node_gpus = gpus(H100, 16, lanes=pairs)
    chosen = _chosen(node_gpus, count)
    assert len(set(chosen)) == count
    assert sum(pairs(a, b) > 0 for a, b in combinations(chosen, 2)) == count // 2


def _lanes(chosen: tuple[int, ...] | list[int]) -> int:
    return sum(cube_mesh(a, b) for a, b in combinations(chosen, 2))
