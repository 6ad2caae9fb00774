"""Which failures are retried, and when."""

import pytest

from mooring_client.errors import (
    Conflict,
    DatabaseUnavailable,
    IdempotencyInProgress,
    InsufficientCapacity,
    Invalid,
    MooringError,
    TooManyRequests,
    Unauthorized,
)
from mooring_client.failures import ConnectionFailed
from mooring_client.reconnecting import Reconnecting
from mooring_client.retries import Attempts

Failure = MooringError | ConnectionFailed


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionFailed("lost"),
        DatabaseUnavailable("away"),
        TooManyRequests("slow"),
        IdempotencyInProgress("wait"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_what_may_pass_is_retried_with_growing_pauses(failure: Failure) -> None:
    attempts = Attempts(max_retries=3, jitter=lambda: 1.0)
    assert [attempts.pause_after(failure) for _ in range(3)] == [0.25, 0.5, 1.0]
    with pytest.raises(type(failure)):
        attempts.pause_after(failure)


@pytest.mark.parametrize(
    "failure",
    [Unauthorized("no key"), Invalid("wrong"), Conflict("state"), InsufficientCapacity("full")],
    ids=lambda failure: type(failure).__name__,
)
def test_what_lasts_is_not_retried(failure: Failure) -> None:
    with pytest.raises(type(failure)):
        Attempts(max_retries=3).pause_after(failure)


def test_jitter_halves_a_pause_at_most() -> None:
    assert Attempts(1, jitter=lambda: 0.0).pause_after(ConnectionFailed("lost")) == 0.125


def test_retry_after_is_honoured_up_to_a_minute() -> None:
    attempts = Attempts(3, jitter=lambda: 1.0)
    assert attempts.pause_after(TooManyRequests("slow", retry_after_s=7)) == 7.25
    with pytest.raises(TooManyRequests):
        attempts.pause_after(TooManyRequests("until midnight", retry_after_s=3600))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_follower_gives_up_when_the_server_has_been_away_for_long() -> None:
    clock = Clock()
    following = Reconnecting(60, clock)
    lost = ConnectionFailed("lost")
    pauses = []
    for _ in range(8):
        pauses.append(following.pause_after(lost))
        clock.now += 5
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    following.connected()
    assert following.pause_after(lost) == 0.1
    clock.now += 61
    with pytest.raises(ConnectionFailed):
        following.pause_after(lost)


def test_a_follower_waits_as_long_as_the_server_asks() -> None:
    assert Reconnecting(60, Clock()).pause_after(TooManyRequests("slow", retry_after_s=9)) == 9


def test_a_follower_without_access_ends_at_once() -> None:
    with pytest.raises(Unauthorized):
        Reconnecting(60, Clock()).pause_after(Unauthorized("revoked"))
