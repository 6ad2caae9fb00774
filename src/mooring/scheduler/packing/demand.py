"""What will be asked for next, as far as what was asked lately tells."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.scheduler.packing.potential import Potential, Target
from mooring.scheduler.packing.shapes import Shape
from mooring.scheduler.packing.share_values import worth_of_rests

# How much a request counts halves while so many others are made: about a day of a busy cluster.
HALF_LIFE = 10_000
# The picture is compared with what was asked for when this part of it is new, and drawn anew when so large a
# part of the requests have other shapes than it says. Scores are kept for as long as the picture stays.
_RENEWED = 0.2
_FIRST = 25
_OTHER = 0.05
# Memory is bounded by the shapes that are told apart, and the time for a picture by those it is made of.
MAX_KNOWN = 512
_MAX_TARGETS = 48

# What the two kinds of waste that are counted by target weigh, each; the third, by prices, weighs 1.
BY_TARGET = 0.1
# A target's weight falls with the square of the part of a GPU that it asks for: what is small can use what
# nothing else can, and only what not even that can use is lost for good. Several GPUs are whole ones: to
# weigh them less, as so many times larger, leaves no node whole for them.
BY_PART = -2.0

# Until something was asked for: whole GPUs, with their part of the CPUs.
_AT_FIRST = {Shape(1, WHOLE_MILLI, None, None): 1.0}


class Demand:
    """Counts of the shapes that were asked for, older ones fading away."""

    def __init__(self) -> None:
        self._counts: dict[Shape, float] = {}
        self._total = 0.0
        self._next: dict[Shape, int] = {}  # not counted yet
        self._new = 0
        self._drawn: dict[Shape, float] = {}  # the parts in the picture
        self._potential = potential_for(_AT_FIRST)

    @property
    def potential(self) -> Potential:
        """By what was asked for until the picture was drawn."""
        return self._potential

    @property
    def known(self) -> int:
        """How many shapes are told apart."""
        return len(self._counts) + len(self._next)

    def count(self, shape: Shape) -> float:
        """How often it was asked for, faded; what came after the last comparison is left out."""
        return self._counts.get(target_of(shape), 0.0)

    def offer(self, shape: Shape) -> bool:
        """One more is asked for. True: there is a new `potential`."""
        target = target_of(shape)
        self._next[target] = self._next.get(target, 0) + 1
        self._new += 1
        if self._new < max(_FIRST, _RENEWED * self._total) and len(self._next) < MAX_KNOWN:
            return False
        self._count()
        parts = {shape: count / self._total for shape, count in self._counts.items()}
        if _distance(parts, self._drawn) < _OTHER:
            return False
        self._drawn = parts
        self._potential = potential_for(self._counts)
        return True

    def _count(self) -> None:
        fading = 0.5 ** (self._new / HALF_LIFE)
        counts = {shape: count * fading for shape, count in self._counts.items()}
        for shape, count in self._next.items():
            counts[shape] = counts.get(shape, 0.0) + count
        self._counts = dict(_most_asked(counts, MAX_KNOWN))
        self._total = sum(self._counts.values())
        self._next, self._new = {}, 0


def potential_for(counts: Mapping[Shape, float]) -> Potential:
    """The waste of states if requests come as they were counted. Counts of nothing: no state is wasteful."""
    known = _most_asked(counts, MAX_KNOWN)
    targets = [
        Target(shape, BY_TARGET * weight, BY_TARGET * weight)
        for shape, weight in _most_asked(_weights(known), _MAX_TARGETS)
    ]
    shares: dict[int, float] = {}
    for shape, count in known:
        if shape.share:
            shares[shape.gpu_milli] = shares.get(shape.gpu_milli, 0.0) + count
    return Potential(targets, worth_of_rests(shares), 1.0 if shares else 0.0)


@lru_cache(maxsize=4096)
def target_of(shape: Shape) -> Shape:
    """The shape as far as it decides what is waste. Memory hardly ever does, whose it is never."""
    return replace(shape, memory_mib=0, owner="")


def _weights(counts: Iterable[tuple[Shape, float]]) -> dict[Shape, float]:
    """The part that each target has in the expected waste; they add up to 1."""
    raw = {shape: count * (shape.gpu_milli / WHOLE_MILLI) ** BY_PART for shape, count in counts if shape.gpus}
    total = sum(raw.values())
    return {shape: weight / total for shape, weight in raw.items()}


def _distance(a: Mapping[Shape, float], b: Mapping[Shape, float]) -> float:
    """The part of the requests that have another shape by one than by the other."""
    return 0.5 * sum(abs(a.get(shape, 0.0) - b.get(shape, 0.0)) for shape in sorted({*a, *b}, key=_key))


def _most_asked(counts: Mapping[Shape, float], most: int) -> list[tuple[Shape, float]]:
    """In an order that depends on nothing else."""
    return sorted(counts.items(), key=lambda item: (-item[1], _key(item[0])))[:most]


def _key(shape: Shape) -> tuple[object, ...]:
    cpu_milli = -1 if shape.cpu_milli is None else shape.cpu_milli
    return shape.gpus, shape.gpu_milli, cpu_milli, tuple(sorted(shape.models))
