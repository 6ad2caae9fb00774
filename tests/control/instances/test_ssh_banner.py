"""What the lines at the start of a shell say."""

from datetime import timedelta

import pytest

from mooring.control.instances.ssh_banner import described, duration


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        ([], "none"),
        ([("NVIDIA H100", 1000, 8)], "8 x NVIDIA H100"),
        ([("NVIDIA A100", 125, 2), ("NVIDIA H100", 1000, 1)], "2 x 12.5 % of NVIDIA A100, 1 x NVIDIA H100"),
    ],
)
def test_gpus_are_counted_by_model_and_share(gpus: list[tuple[str, int, int]], shown: str) -> None:
    assert described(gpus) == shown


@pytest.mark.parametrize(
    ("left", "shown"),
    [
        (timedelta(days=2, hours=5, minutes=59), "2 d 5 h"),
        (timedelta(hours=1, minutes=59, seconds=59), "1 h 59 min"),
        (timedelta(minutes=3), "3 min"),
        (timedelta(seconds=59), "0 min"),
        (timedelta(seconds=-5), "0 min"),
    ],
)
def test_the_time_left_has_two_units_rounded_down(left: timedelta, shown: str) -> None:
    assert duration(left) == shown
