"""The service clock: it advances steadily, whatever the wall clock does."""

import logging
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooring.db.clock import Record, ServiceClock

START_S = datetime(2026, 11, 24, tzinfo=UTC).timestamp()
DAY_S = 86_400.0


class Clocks:
    """A wall clock and a steady clock that the test sets, and a service clock that was started on them."""

    def __init__(self, newest_s: float | None = START_S - 60, record: Record | None = None) -> None:
        self.wall_s, self.steady_s = START_S, 1000.0
        self.service = ServiceClock(lambda: self.wall_s, lambda: self.steady_s)
        self._newest_s, self._record = newest_s, record

    def start(self) -> None:
        self.service.start(self.wall_s, self._newest_s, self._record)

    def advance(self, seconds: float, drift: float = 1.0) -> None:
        """Let time pass, and compare the clocks every ten seconds as the loop does."""
        end_s = self.steady_s + seconds
        while self.steady_s < end_s:
            step_s = min(10.0, end_s - self.steady_s)
            self.steady_s += step_s
            self.wall_s += step_s * drift
            self.service.observe(self.wall_s)


def started(newest_s: float | None = START_S - 60, record: Record | None = None) -> Clocks:
    clocks = Clocks(newest_s, record)
    clocks.start()
    return clocks


def test_before_the_start_it_shows_the_wall_clock() -> None:
    clocks = Clocks()
    assert clocks.service.time() == START_S
    clocks.wall_s += 5
    assert clocks.service.time() == START_S + 5


@pytest.mark.parametrize("jump_s", [-DAY_S, -30, 30, 3600, DAY_S, 3650 * DAY_S])
def test_a_jump_is_not_followed(jump_s: float) -> None:
    clocks = started()
    clocks.wall_s += jump_s
    clocks.advance(3600)
    assert clocks.service.time() == pytest.approx(START_S + 3600, abs=1.9)


@pytest.mark.parametrize("drift", [0.9999, 1.0001])
def test_a_wall_clock_that_is_corrected_slowly_is_followed(drift: float) -> None:
    clocks = started()
    clocks.advance(10 * DAY_S, drift)
    assert clocks.service.time() == pytest.approx(clocks.wall_s, abs=0.02)


@pytest.mark.parametrize("jump_s", [-1.0, 1.0])
def test_a_small_difference_is_corrected_at_500_ppm(jump_s: float) -> None:
    clocks = started()
    clocks.wall_s += jump_s
    clocks.advance(1000)
    assert abs(clocks.service.time() - clocks.wall_s) == pytest.approx(0.5, abs=0.02)
    clocks.advance(2000)
    assert clocks.service.time() == pytest.approx(clocks.wall_s, abs=0.02)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(-1e9, 1e9)), max_size=30))
def test_it_never_goes_back_and_measures_durations(steps: list[tuple[float, float]]) -> None:
    clocks = started()
    before = began = clocks.service.time()
    passed_s = 0.0
    for step_s, jump_s in steps:
        clocks.wall_s += jump_s
        clocks.advance(step_s)
        passed_s += step_s
        assert clocks.service.time() > before
        before = clocks.service.time()
    assert before - began == pytest.approx(passed_s, rel=0.0006, abs=0.001)


def test_it_starts_at_the_wall_clock_after_a_long_absence() -> None:
    assert started(newest_s=START_S - 59 * DAY_S).service.time() == START_S
    assert started(newest_s=None).service.time() == START_S


@pytest.mark.parametrize("wrong_s", [-3650 * DAY_S, -3600, 61 * DAY_S, 3650 * DAY_S])
def test_an_implausible_wall_clock_is_not_used_until_it_is_set(
    wrong_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks()
    clocks.wall_s += wrong_s
    clocks.start()
    assert clocks.service.time() == START_S - 60
    assert "accept-clock" in caplog.text
    clocks.advance(3600)
    assert clocks.service.time() == pytest.approx(START_S - 60 + 3600, abs=1.9)
    assert clocks.service.record("boot") is None

    clocks.wall_s = START_S + 3600 + 20  # NTP sets it
    clocks.advance(10)
    assert clocks.service.time() == clocks.wall_s
    assert clocks.service.record("boot") is not None
    clocks.wall_s += 3600
    clocks.advance(10)
    assert clocks.service.time() == pytest.approx(START_S + 3640, abs=1)


def test_a_later_process_of_the_same_boot_continues() -> None:
    clocks = started(record=Record("boot", 400.0, START_S - 7200))
    assert clocks.service.time() == START_S - 7200 + 600
    clocks.advance(100)
    assert clocks.service.record("boot") == Record("boot", 1100.0, clocks.service.time())


def test_a_record_from_the_future_of_the_steady_clock_is_not_used() -> None:
    assert started(record=Record("boot", 1001.0, 5.0)).service.time() == START_S


def test_a_difference_is_logged_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clocks = started()
    clocks.advance(60)
    assert caplog.messages == []
    clocks.wall_s += DAY_S
    clocks.advance(3000)
    assert len(caplog.messages) == 1
    assert "it shows 2026-11-25T00:01:10+00:00" in caplog.messages[0]
    clocks.advance(3600)
    assert len(caplog.messages) == 2
    clocks.wall_s -= DAY_S
    clocks.advance(60)
    clocks.wall_s += 1e15
    clocks.advance(10)
    assert "s after 1970" in caplog.messages[2]
