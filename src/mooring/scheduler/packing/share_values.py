"""What the free part of a shared GPU is worth to the shares that are expected.

Packing the expected mix of shares into the fewest GPUs is the cutting-stock problem. The dual of its linear
relaxation gives each size a price: what one more share of that size costs in GPUs, in thousandths, with what
can be put beside it counted in. A rest is worth the best it can be filled with at these prices: 190 left
beside a share of 810 is worth nothing when nothing that small is asked for.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from mooring.core.instance.spec import WHOLE_MILLI

Floats = NDArray[np.float64]

# Of several optimal duals, or of one found a little early, the difference is less than rounding's.
_ENOUGH = WHOLE_MILLI * 1.001
_MAX_PATTERNS = 500


def worth_of_rests(shares: Mapping[int, float]) -> NDArray[np.int64]:
    """What a rest of 0, 1, … 1000 thousandths of a GPU is worth, in thousandths.

    A rest may be worth more than it is: two of 810 host what would take two whole GPUs. One of which nothing
    is given out is worth 1000, because whole GPUs are asked for too.

    Args:
        shares: how often each size (1..999) is asked for.
    """
    sizes = np.array(sorted(size for size, count in shares.items() if count > 0), np.int64)
    if not len(sizes):
        return np.where(np.arange(WHOLE_MILLI + 1) < WHOLE_MILLI, 0, WHOLE_MILLI)
    prices = _prices(sizes, np.array([shares[int(size)] for size in sizes]))
    worth = np.floor(_best_fill(sizes, prices)[0] + 0.5).astype(np.int64)
    worth[WHOLE_MILLI] = WHOLE_MILLI
    return worth


def _prices(sizes: NDArray[np.int64], demand: Floats) -> Floats:
    """The dual prices, by column generation: a pattern that is worth more than a GPU is a new constraint."""
    patterns = {
        tuple(WHOLE_MILLI // int(size) if row == column else 0 for column in range(len(sizes))): None
        for row, size in enumerate(sizes)
    }
    while True:
        bounds = np.full(len(patterns), WHOLE_MILLI)
        solved = linprog(-demand, A_ub=np.array(list(patterns)), b_ub=bounds, bounds=(0, WHOLE_MILLI))
        prices = np.asarray(solved.x, np.float64)
        worth, last = _best_fill(sizes, prices)
        known = len(patterns)
        if worth[WHOLE_MILLI] > _ENOUGH and known < _MAX_PATTERNS:
            # The best pattern with each size in it, for fewer rounds.
            for first in np.flatnonzero(prices + worth[WHOLE_MILLI - sizes] > _ENOUGH):
                patterns[_pattern(sizes, last, int(first))] = None
        if len(patterns) == known:
            return prices * (WHOLE_MILLI / max(WHOLE_MILLI, float(worth[WHOLE_MILLI])))


def _best_fill(sizes: NDArray[np.int64], prices: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The best fill of each rest, and the last share put in; -1: what fills a smaller rest is as good."""
    worth = np.zeros(WHOLE_MILLI + 1)
    last = np.full(WHOLE_MILLI + 1, -1)
    step = int(np.gcd.reduce(np.append(sizes, WHOLE_MILLI)))
    for rest in range(step, WHOLE_MILLI + 1, step):
        fitting = int(np.searchsorted(sizes, rest, side="right"))
        worth[rest] = worth[rest - step]
        if fitting:
            filled = worth[rest - sizes[:fitting]] + prices[:fitting]
            best = int(filled.argmax())
            if filled[best] > worth[rest]:
                worth[rest], last[rest] = filled[best], best
    if step > 1:
        worth = worth[np.arange(WHOLE_MILLI + 1) // step * step]
        last = last[np.arange(WHOLE_MILLI + 1) // step * step]
    return worth, last


def _pattern(sizes: NDArray[np.int64], last: NDArray[np.int64], first: int) -> tuple[int, ...]:
    """How often each size is in the best fill of a GPU that has the first one in it."""
    pattern = [0] * len(sizes)
    pattern[first] = 1
    rest = WHOLE_MILLI - int(sizes[first])
    while rest > 0:
        if last[rest] < 0:
            rest -= 1
        else:
            pattern[last[rest]] += 1
            rest -= int(sizes[last[rest]])
    return tuple(pattern)
