"""Which GPUs of a node to give: the best connected together, and the rest as well connected as can be."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb
from operator import attrgetter
from typing import Any

from mooring.scheduler.model import GpuView

# How near two GPUs are on PCIe; what the driver does not tell is farther than anything it does.
_CLOSENESS = {"internal": 6, "single": 5, "multiple": 4, "hostbridge": 3, "node": 2, "system": 1}

# One NVLink lane outweighs the closeness of all pairs of a node: 64 GPUs have 2016 pairs, 2016 * 6 < 2**14.
_LANE = 2**14

# 600 sets take 0.6 ms. All choices of up to 11 GPUs, and of 2 or 3 out of 16, are below it.
_MAX_SETS = 600

# The link between each two GPUs. Nodes of one make have equal ones, so what is chosen once is remembered.
Matrix = tuple[tuple[int, ...], ...]
_MAX_MATRICES = 20_000
_PLACE = attrgetter("index", "uuid")
_matrices: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[list[Mapping[str, Any]], Matrix]] = {}


def choose(free: Iterable[GpuView], count: int, of_the_node: Iterable[GpuView] = ()) -> tuple[str, ...]:
    """The UUIDs of the `count` GPUs to give, lowest index first.

    The sum of NVLink lanes within the set comes first, then PCIe closeness, then the same two sums over
    the GPUs that stay free, then the lowest indexes. One GPU has no links within, so the second half
    decides: it is taken from where it breaks the fewest links.

    Args:
        of_the_node: a set that the free ones are of; the links within it are remembered.
    """
    gpus = in_order(free)
    if count >= len(gpus):
        return tuple(gpu.uuid for gpu in gpus)
    everything = in_order(of_the_node) or gpus
    uuids = {gpu.uuid for gpu in gpus}
    places = [place for place, gpu in enumerate(everything) if gpu.uuid in uuids]
    links = matrix(everything)
    among = tuple(tuple(links[a][b] for b in places) for a in places)
    return tuple(gpus[place].uuid for place in best_set(among, count))


def score(given: Collection[str], of_the_node: Iterable[GpuView]) -> float | None:
    """How well those given (UUIDs) are connected: 1 where no set of so many is better; null for one alone."""
    if len(given) < 2:
        return None
    everything = in_order(of_the_node)
    links = matrix(everything)
    best = _within(best_set(links, len(given)), links)
    mine = _within((place for place, gpu in enumerate(everything) if gpu.uuid in given), links)
    return round(mine / best, 3) if best else 1.0


def in_order(gpus: Iterable[GpuView]) -> list[GpuView]:
    return sorted(gpus, key=_PLACE)


def matrix(gpus: Sequence[GpuView]) -> Matrix:
    """The links between these. They hardly ever change: a node's is worked out once.

    The same mappings mean the same links, and those that are remembered cannot be taken for others.
    """
    told = [each for gpu in gpus for each in (gpu.nvlink, gpu.topology)]
    key = (tuple(gpu.uuid for gpu in gpus), tuple(map(id, told)))
    # Taken out once: another thread may clear them all at any moment.
    found = _matrices.get(key)
    if found is None:
        if len(_matrices) >= _MAX_MATRICES:
            _matrices.clear()
        links = tuple(tuple(0 if a is b else _link(a, b) for b in gpus) for a in gpus)
        found = _matrices[key] = told, links
    return found[1]


def _link(a: GpuView, b: GpuView) -> int:
    """Either card may know of the link: a driver that hides it on one side has not unplugged it."""
    lanes = max(a.nvlink.get(b.uuid, 0), b.nvlink.get(a.uuid, 0))
    closeness = max(_closeness(a, b), _closeness(b, a))
    return lanes * _LANE + closeness


def _closeness(a: GpuView, b: GpuView) -> int:
    return _CLOSENESS.get(a.topology.get(b.uuid, ""), 0)


@lru_cache(maxsize=16_384)
def best_set(links: Matrix, count: int) -> tuple[int, ...]:
    """The places of the best set of so many, lowest first."""
    places = range(len(links))
    if count >= len(links) or _all_equal(links):
        return tuple(places[:count])
    sets: Iterable[tuple[int, ...]]
    if comb(len(links), count) <= _MAX_SETS:
        sets = combinations(places, count)
    else:
        sets = [_grown_from(seed, links, count) for seed in places]
    degrees = [sum(row) for row in links]
    # max() keeps the first of equals, and combinations() come lowest indexes first.
    return max(sets, key=lambda chosen: _worth(chosen, links, degrees))


def _all_equal(links: Matrix) -> bool:
    """An NVSwitch, or nothing known: every set is as good as every other."""
    return len({link for a, row in enumerate(links) for link in row[:a]}) <= 1


def _worth(chosen: tuple[int, ...], links: Matrix, degrees: list[int]) -> tuple[int, int]:
    """The links within the set, then those among the rest, which are all less the set's own and the cut.

    links(rest) = links(all) - sum of degrees(set) + links(set), and links(all) is the same for all sets.
    """
    within = _within(chosen, links)
    return within, within - sum(degrees[place] for place in chosen)


def _within(chosen: Iterable[int], links: Matrix) -> int:
    return sum(links[a][b] for a, b in combinations(chosen, 2))


def _grown_from(seed: int, links: Matrix, count: int) -> tuple[int, ...]:
    """A good set that holds `seed`, not always the best: 12,870 sets of 8 out of 16 take 26 ms."""
    chosen = [seed]
    while len(chosen) < count:
        rest = [place for place in range(len(links)) if place not in chosen]
        chosen.append(max(rest, key=lambda place: _gain(place, chosen, links)))
    return tuple(sorted(chosen))


def _gain(place: int, chosen: list[int], links: Matrix) -> tuple[int, int]:
    within = sum(links[place][other] for other in chosen)
    return within, within - sum(links[place])
