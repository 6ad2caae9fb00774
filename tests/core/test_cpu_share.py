"""`CpuShare`: how long repeated work rests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.core.cpu_share import CpuShare


def test_work_after_idle_time_does_not_rest_until_its_burst_is_used() -> None:
    share = CpuShare(share=0.1, burst_s=0.1, longest_rest_s=10)

    assert [share.rest_after(0.04, 1000), share.rest_after(0.04, 1000)] == [0, 0]
    assert share.rest_after(0.04, 1000) == pytest.approx(0.2)
    assert share.rest_after(0.1, 1060) == 0


def test_a_rest_pays_for_what_was_used() -> None:
    share = CpuShare(share=0.1, burst_s=0, longest_rest_s=10)

    assert [share.rest_after(0.02, 1000 + each * 0.2) for each in range(3)] == [pytest.approx(0.2)] * 3


def test_no_rest_is_longer_than_the_longest_nor_follows_from_older_work() -> None:
    share = CpuShare(share=0.1, burst_s=0.1, longest_rest_s=0.2)

    assert [share.rest_after(5, 1000), share.rest_after(5, 1000)] == [pytest.approx(0.2)] * 2
    assert share.rest_after(0.1, 1001.2) == 0


@given(st.lists(st.floats(0.001, 0.02), min_size=1, max_size=300))
def test_work_that_repeats_at_once_uses_no_more_than_its_share_and_burst(ticks: list[float]) -> None:
    share = CpuShare(share=0.1, burst_s=0.1, longest_rest_s=1.0)
    now_s = 0.0

    for cpu_s in ticks:
        now_s += cpu_s
        now_s += share.rest_after(cpu_s, now_s)

    assert sum(ticks) <= 0.1 * now_s + 0.1 + 1e-6
