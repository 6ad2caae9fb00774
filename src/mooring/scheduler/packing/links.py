"""Selects GPUs of a node: the best connected set that leaves the other GPUs well connected."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb
from operator import attrgetter
from typing import Any

from mooring.core.bounded_dict import BoundedDict
from mooring.scheduler.model import GpuView

# How close two GPUs are on PCIe; an unknown connection counts as the farthest.
_CLOSENESS = {"internal": 6, "single": 5, "multiple": 4, "hostbridge": 3, "node": 2, "system": 1}

# One NVLink lane outweighs the closeness of all pairs of a node: 64 GPUs have 2016 pairs, 2016 * 6 < 2**14.
_LANE = 2**14

# 600 sets take 0.6 ms. All sets of up to 11 GPUs, and of 2 or 3 out of 16, are below this limit.
_MAX_SETS = 600

# The link of each pair of GPUs. Nodes of one type have equal matrices, so the best sets are cached.
Matrix = tuple[tuple[int, ...], ...]
_PLACE = attrgetter("index", "uuid")
_Key = tuple[tuple[str, ...], tuple[int, ...]]
_matrices: BoundedDict[_Key, tuple[list[Mapping[str, Any]], Matrix]] = BoundedDict(20_000)


def choose(free: Iterable[GpuView], count: int, superset: Iterable[GpuView] = ()) -> tuple[str, ...]:
    """The UUIDs of the best `count` GPUs, lowest index first.

    Sets are compared by their NVLink lanes, then PCIe closeness, then the same two sums over the GPUs that
    stay free, then the lowest indexes. A single GPU is thus the one with the weakest links to the others.

    Args:
        superset: the free GPUs and others of the node; their links are cached under this set.
    """
    gpus = in_order(free)
    if count >= len(gpus):
        return tuple(gpu.uuid for gpu in gpus)
    all_gpus = in_order(superset) or gpus
    uuids = {gpu.uuid for gpu in gpus}
    places = [place for place, gpu in enumerate(all_gpus) if gpu.uuid in uuids]
    links = matrix(all_gpus)
    among = tuple(tuple(links[a][b] for b in places) for a in places)
    return tuple(gpus[place].uuid for place in best_set(among, count))


def score(given: Collection[str], of_the_node: Iterable[GpuView]) -> float | None:
    """How well these GPUs (UUIDs) are connected, up to 1 for the best set of this size; None for one GPU."""
    if len(given) < 2:
        return None
    all_gpus = in_order(of_the_node)
    links = matrix(all_gpus)
    best = _within(best_set(links, len(given)), links)
    actual = _within((place for place, gpu in enumerate(all_gpus) if gpu.uuid in given), links)
    return round(actual / best, 3) if best else 1.0


def in_order(gpus: Iterable[GpuView]) -> list[GpuView]:
    return sorted(gpus, key=_PLACE)


def matrix(gpus: Sequence[GpuView]) -> Matrix:
    """The links between these GPUs, computed once per node.

    The key has the ids of the link mappings, which the cache keeps alive: so no id is used twice.
    """
    mappings = [each for gpu in gpus for each in (gpu.nvlink, gpu.topology)]
    key = (tuple(gpu.uuid for gpu in gpus), tuple(map(id, mappings)))
    found = _matrices.get(key)
    if found is None:
        links = tuple(tuple(0 if a is b else _link(a, b) for b in gpus) for a in gpus)
        found = _matrices[key] = mappings, links
    return found[1]


def _link(a: GpuView, b: GpuView) -> int:
    """The link counts if either GPU reports it: some drivers hide it on one side."""
    lanes = max(a.nvlink.get(b.uuid, 0), b.nvlink.get(a.uuid, 0))
    closeness = max(_closeness(a, b), _closeness(b, a))
    return lanes * _LANE + closeness


def _closeness(a: GpuView, b: GpuView) -> int:
    return _CLOSENESS.get(a.topology.get(b.uuid, ""), 0)


@lru_cache(maxsize=16_384)
def best_set(links: Matrix, count: int) -> tuple[int, ...]:
    """The places of the best set of this size, lowest first."""
    places = range(len(links))
    if count >= len(links) or _all_equal(links):
        return tuple(places[:count])
    sets: Iterable[tuple[int, ...]]
    if comb(len(links), count) <= _MAX_SETS:
        sets = combinations(places, count)
    else:
        sets = [_greedy_set(seed, links, count) for seed in places]
    degrees = [sum(row) for row in links]
    # max() keeps the first of equals, and combinations() come lowest indexes first.
    return max(sets, key=lambda chosen: _set_value(chosen, links, degrees))


def _all_equal(links: Matrix) -> bool:
    """True with an NVSwitch, or without any known link: all sets are equally good."""
    return len({link for a, row in enumerate(links) for link in row[:a]}) <= 1


def _set_value(chosen: tuple[int, ...], links: Matrix, degrees: list[int]) -> tuple[int, int]:
    """The links within the set, then those within the rest (up to a constant).

    links(rest) = links(all) - sum of degrees(set) + links(set), and links(all) is the same for all sets.
    """
    within = _within(chosen, links)
    return within, within - sum(degrees[place] for place in chosen)


def _within(chosen: Iterable[int], links: Matrix) -> int:
    return sum(links[a][b] for a, b in combinations(chosen, 2))


def _greedy_set(seed: int, links: Matrix, count: int) -> tuple[int, ...]:
    """A good set with `seed`, by greedy search: all 12,870 sets of 8 out of 16 would take 26 ms."""
    chosen = [seed]
    while len(chosen) < count:
        rest = [place for place in range(len(links)) if place not in chosen]
        chosen.append(max(rest, key=lambda place: _gain(place, chosen, links)))
    return tuple(sorted(chosen))


def _gain(place: int, chosen: list[int], links: Matrix) -> tuple[int, int]:
    within = sum(links[place][other] for other in chosen)
    return within, within - sum(links[place])
