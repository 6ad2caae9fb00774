"""When nodes count as lost, and when too many went silent at once for that. Pure."""

from collections.abc import Collection
from typing import Final

# A node stops replaceable instances by itself after this part of the time after which it counts as lost.
# The rest is for sending stop signals, killing, and the difference between two clocks.
_SELF_FENCE_PART: Final = 0.8


def self_fence_s(lost_after_s: float) -> float:
    """After how long without contact a node stops its replaceable instances."""
    return lost_after_s * _SELF_FENCE_PART


def is_outage(silent_since: Collection[float], nodes: int, window_s: float) -> bool:
    """Whether so many nodes went silent within one window that an outage of the network is likely.

    That is half of the nodes, and at least two. Their instances probably still run.

    Args:
        silent_since: when each silent node went silent, in seconds.
        nodes: how many nodes there are, including the silent ones.
    """
    times = sorted(silent_since)
    needed = max(2, (nodes + 1) // 2)
    return any(last - first <= window_s for first, last in zip(times, times[needed - 1 :], strict=False))
