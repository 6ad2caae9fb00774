"""The waste of states, and the values of free parts of shared GPUs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.scheduler.packing.potential import UNIT, Potential, Target
from mooring.scheduler.packing.shapes import NodeClass, Shape
from mooring.scheduler.packing.share_values import free_milli_values
from mooring.scheduler.packing.states import States
from mooring_client.schemas.spec import WHOLE_MILLI
from tests.scheduler.fleets import BIG, SMALL, potential, share, whole


def waste(
    measure: Potential, gpu_free: tuple[int, ...], cpu_milli: int, node_class: NodeClass = BIG
) -> float:
    states = States(np.array([0]), np.array([cpu_milli]), np.array([gpu_free]))
    return float(measure.of(states, measure.needs([node_class]))[0]) / UNIT


@pytest.mark.parametrize(
    ("target", "gpu_free", "cpu_milli", "expected"),
    [
        (share(400), (1000, 300), 9000, 300),  # the free part is too small
        (share(400), (1000, 300), 900, 1300),  # no CPUs
        (share(400), (300, 300), 9000, 600),  # no free part is large enough
        (whole(2), (1000, 1000, 500), 9000, 500),
        (whole(2), (1000, 500, 500), 9000, 2000),  # not enough whole GPUs
        (whole(1, models=frozenset({"B"})), (1000, 1000), 9000, 2000),  # another model
        (Shape(0, 0, 1000, 0), (1000, 700), 9000, 1700),  # requests no GPU
    ],
)
def test_stranded_is_what_the_next_request_cannot_use(
    target: Shape, gpu_free: tuple[int, ...], cpu_milli: int, expected: int
) -> None:
    assert waste(Potential([Target(target, stranded=1)]), gpu_free, cpu_milli) == expected


@pytest.mark.parametrize(
    ("target", "gpu_free", "cpu_milli", "expected"),
    [
        (share(400), (1000, 300), 9000, 500),
        (share(400), (1000, 1000), 3000, 800),  # CPUs for three
        (whole(1), (1000,) * 8, 20_000, 3000),  # CPUs for five
        (whole(2), (1000,) * 3, 20_000, 1000),
        (whole(1), (0,), 20_000, 0),  # nothing free, nothing wasted
        (whole(1, cpu_milli=0), (1000,) * 2, 0, 0),
        (Shape(1, WHOLE_MILLI, None, None), (1000,) * 8, 48_000, 4000),  # an eighth of the CPUs each
    ],
)
def test_unfilled_is_what_repeated_requests_leave(
    target: Shape, gpu_free: tuple[int, ...], cpu_milli: int, expected: int
) -> None:
    assert waste(Potential([Target(target, unfilled=1)]), gpu_free, cpu_milli) == expected


def test_weights_add_up() -> None:
    both = Potential([Target(share(400), 0.5, 0.25), Target(whole(), 0.25, 0)])
    assert waste(both, (1000, 300), 9000) == 0.5 * 300 + 0.25 * 500 + 0.25 * 300


def test_without_targets_there_is_no_waste() -> None:
    assert waste(Potential(), (1000, 300), 9000) == 0


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, WHOLE_MILLI), min_size=2, max_size=2), st.integers(0, 16_000)),
        min_size=1,
        max_size=300,
    )
)
def test_the_waste_of_a_state_does_not_depend_on_its_batch(rows: list[tuple[list[int], int]]) -> None:
    measure = potential()
    states = States(
        np.zeros(len(rows), np.int64),
        np.array([cpu_milli for _gpu_free, cpu_milli in rows]),
        np.array([gpu_free for gpu_free, _cpu in rows]),
    )
    together = measure.of(states, measure.needs([SMALL]))
    some = [0, len(rows) // 2, len(rows) - 1]
    assert [together[row] for row in some] == [
        measure.of(states.rows(np.array([row])), measure.needs([SMALL]))[0] for row in some
    ]


class TestFreeMilliValues:
    def test_a_size_that_fills_a_gpu_alone_costs_a_gpu(self) -> None:
        values = free_milli_values({810: 10})
        assert [values[free] for free in (190, 809, 810, 1000)] == [0, 0, 1000, 1000]

    def test_a_free_part_below_all_sizes_has_no_value(self) -> None:
        values = free_milli_values({470: 5, 650: 1})
        assert values[469] == 0
        assert values[470] == 500

    def test_small_shares_have_a_price_once_they_need_more_gpus(self) -> None:
        scarce, plenty = free_milli_values({810: 100, 190: 10}), free_milli_values({810: 10, 190: 100})
        assert scarce[190] == 0  # more of them fit beside the large ones
        assert plenty[190] == 200  # five to a GPU
        assert plenty[810] == 800

    def test_without_shares_only_whole_gpus_have_a_value(self) -> None:
        assert free_milli_values({}).tolist() == [0] * WHOLE_MILLI + [WHOLE_MILLI]

    @settings(deadline=None, max_examples=25)
    @given(st.dictionaries(st.integers(1, 999), st.integers(1, 50), max_size=4))
    def test_values_rise_with_size_and_two_parts_have_no_more_than_the_whole(
        self, shares: dict[int, int]
    ) -> None:
        values = free_milli_values({size: float(count) for size, count in shares.items()})
        assert (np.diff(values) >= 0).all()
        assert values[0] == 0
        assert values[WHOLE_MILLI] == WHOLE_MILLI
        for a in range(0, WHOLE_MILLI, 37):
            assert values[a] + values[WHOLE_MILLI - a] <= WHOLE_MILLI + 2  # because of rounding
