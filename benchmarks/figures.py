"""Medians, percentiles and printed results of benchmarks."""

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that a fraction `share` of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def verdict(name: str, value: float, bound: float, unit: str = "", *, at_least: bool = False) -> bool:
    """Print a figure and its bound. Returns whether it is within the bound."""
    holds = value >= bound if at_least else value <= bound
    sign = ">=" if at_least else "<="
    print(
        f"{'ok  ' if holds else 'MISS'} {name}: {value:.3g}{unit} (wanted {sign} {bound:g}{unit})", flush=True
    )
    return holds
