"""Times of a node with a wrong clock, within bounds of the control plane's clock."""

from datetime import UTC, datetime, timedelta

import pytest

from mooring.core.instance import run_times

PLACED = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)
NOW = PLACED + timedelta(seconds=60)


def reported(offset_s: float) -> str:
    return (PLACED + timedelta(seconds=offset_s)).isoformat()


@pytest.mark.parametrize(
    ("time", "expected_s"),
    [
        (reported(10), 10),
        (reported(-3600), 0),
        (reported(3600), 60),
        (None, 60),
        ("nonsense", 60),
        ("2026-11-24T12:00:10", 60),
        ("9999-12-31T23:59:59.999999Z", 60),
        ("0001-01-01T00:00:00Z", 0),
    ],
)
def test_a_start_is_between_the_placement_and_now(time: str | None, expected_s: float) -> None:
    assert run_times.started(PLACED, NOW, time) == PLACED + timedelta(seconds=expected_s)


@pytest.mark.parametrize("clock_s", [-3600.0, -1.0, 0.0])
def test_a_run_of_three_seconds_lasts_three_seconds_by_any_clock(clock_s: float) -> None:
    """The control plane's clock may be ahead: both of the node's times are then before the placement."""
    began, ended = reported(10 + clock_s), reported(13 + clock_s)
    since = run_times.started(PLACED, NOW, began)
    assert run_times.stopped(since, NOW, began, ended) - since == timedelta(seconds=3)


@pytest.mark.parametrize(
    ("began", "ended"),
    [
        (reported(10), reported(5)),
        (reported(10), reported(86_400)),
        (None, reported(86_400)),
        (reported(10), None),
        (reported(10), "nonsense"),
        (reported(10), "2026-11-24T12:00:20"),
    ],
)
def test_without_a_valid_time_it_stopped_now(began: str | None, ended: str | None) -> None:
    assert run_times.stopped(PLACED + timedelta(seconds=10), NOW, began, ended) == NOW


def test_a_stop_after_several_starts_is_at_the_nodes_time() -> None:
    since = PLACED + timedelta(seconds=10)
    assert run_times.stopped(since, NOW, reported(30), reported(33)) == PLACED + timedelta(seconds=33)
    assert run_times.stopped(since, NOW, None, reported(33)) == PLACED + timedelta(seconds=33)
