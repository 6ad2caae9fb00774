"""Pauses between tries."""

from mooring.core.backoff import Backoff, backoff_s


def test_pauses_double_up_to_the_longest_until_a_success() -> None:
    backoff = Backoff(1, 5)
    assert [backoff.pause_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.pause_s() == 1


def test_jitter_scales_each_pause() -> None:
    factors = iter((0.5, 0.75))
    backoff = Backoff(2, 60, lambda: next(factors))
    assert [backoff.pause_s(), backoff.pause_s()] == [1, 3]


def test_days_of_failures_do_not_overflow() -> None:
    assert backoff_s(100_000, 0.2, 30) == 30
