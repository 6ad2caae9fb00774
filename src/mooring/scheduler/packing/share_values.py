"""The value of the free part of a shared GPU, given the expected shares.

Packing the expected mix of shares into the fewest GPUs is the cutting-stock problem. The dual of its linear
relaxation gives each size a price: what one more share of that size costs, in thousandths of a GPU, given
what fits beside it. The value of a free part is that of the shares that best fill it at these prices: 190
free beside a share of 810 have no value if every request is larger.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mooring_client.schemas.spec import WHOLE_MILLI

Floats = NDArray[np.float64]

# Within this limit the prices are accurate enough: values are rounded to thousandths of a GPU.
_LIMIT = WHOLE_MILLI * 1.001
_MAX_PATTERNS = 500


def free_milli_values(shares: Mapping[int, float]) -> NDArray[np.int64]:
    """The value of 0, 1, … 1000 free thousandths of a GPU, in thousandths.

    A free part may have a value above its size: 810 may host what otherwise takes a whole GPU. An
    unused GPU has the value 1000, because whole GPUs are requested too.

    Args:
        shares: how often each size (1..999) is requested.
    """
    sizes = np.array(sorted(size for size, count in shares.items() if count > 0), np.int64)
    if not len(sizes):
        return np.where(np.arange(WHOLE_MILLI + 1) < WHOLE_MILLI, 0, WHOLE_MILLI)
    prices = _prices(sizes, np.array([shares[int(size)] for size in sizes]))
    values = np.floor(_best_fill(sizes, prices)[0] + 0.5).astype(np.int64)
    values[WHOLE_MILLI] = WHOLE_MILLI
    return values


def _prices(sizes: NDArray[np.int64], demand: Floats) -> Floats:
    """The dual prices, by column generation: a set of shares worth more than a GPU becomes a constraint."""
    from scipy.optimize import linprog  # noqa: PLC0415 (0.4 s, which only clusters with shares need)

    patterns = {
        tuple(WHOLE_MILLI // int(size) if row == column else 0 for column in range(len(sizes))): None
        for row, size in enumerate(sizes)
    }
    while True:
        bounds = np.full(len(patterns), WHOLE_MILLI)
        solution = linprog(-demand, A_ub=np.array(list(patterns)), b_ub=bounds, bounds=(0, WHOLE_MILLI))
        prices = np.asarray(solution.x, np.float64)
        values, last = _best_fill(sizes, prices)
        before = len(patterns)
        if values[WHOLE_MILLI] > _LIMIT and before < _MAX_PATTERNS:
            # Add the best pattern with each size in it, which takes fewer rounds.
            for first in np.flatnonzero(prices + values[WHOLE_MILLI - sizes] > _LIMIT):
                patterns[_pattern(sizes, last, int(first))] = None
        if len(patterns) == before:
            return prices * (WHOLE_MILLI / max(WHOLE_MILLI, float(values[WHOLE_MILLI])))


def _best_fill(sizes: NDArray[np.int64], prices: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The value of the best fill of each free amount, and the last size in it (-1: as a smaller amount)."""
    values = np.zeros(WHOLE_MILLI + 1)
    last = np.full(WHOLE_MILLI + 1, -1)
    step = int(np.gcd.reduce(np.append(sizes, WHOLE_MILLI)))
    for free in range(step, WHOLE_MILLI + 1, step):
        fitting = int(np.searchsorted(sizes, free, side="right"))
        values[free] = values[free - step]
        if fitting:
            filled = values[free - sizes[:fitting]] + prices[:fitting]
            best = int(filled.argmax())
            if filled[best] > values[free]:
                values[free], last[free] = filled[best], best
    if step > 1:
        values = values[np.arange(WHOLE_MILLI + 1) // step * step]
        last = last[np.arange(WHOLE_MILLI + 1) // step * step]
    return values, last


def _pattern(sizes: NDArray[np.int64], last: NDArray[np.int64], first: int) -> tuple[int, ...]:
    """How often each size occurs in the best fill of a GPU that contains the size `first`."""
    pattern = [0] * len(sizes)
    pattern[first] = 1
    free = WHOLE_MILLI - int(sizes[first])
    while free > 0:
        if last[free] < 0:
            free -= 1
        else:
            pattern[last[free]] += 1
            free -= int(sizes[last[free]])
    return tuple(pattern)
