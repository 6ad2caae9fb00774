"""Estimates the mix of future requests from recent ones."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from mooring.scheduler.packing.potential import Potential, Target
from mooring.scheduler.packing.shapes import Shape
from mooring.scheduler.packing.share_values import free_milli_values
from mooring_client.schemas.spec import WHOLE_MILLI

# Requests after which the weight of a request has halved: about a day of a busy cluster.
HALF_LIFE = 10_000
# The current mix is compared with that of the potential once this fraction of the requests is new.
_COMPARE_AFTER = 0.2
_FIRST_COMPARE_AFTER = 25
# A new potential is built if this fraction of requests differs. Until then, cached scores stay valid.
_REBUILD_DISTANCE = 0.05
MAX_KNOWN = 512  # shapes; bounds the memory
_MAX_TARGETS = 48  # bounds the time to build a potential

# The weight of stranded and of unfilled waste (see `potential`), which are counted per target; that of
# worthless parts is 1.
TARGET_WEIGHT = 0.1
# A target's weight falls with the square of the GPU fraction that it requests: small requests can use what
# large ones cannot, and only what even the small ones cannot use is lost. A request for several GPUs has the
# weight of one for a whole GPU: with a smaller weight, no node would keep all its GPUs free for it.
FRACTION_EXPONENT = -2.0

# Before the first request: whole GPUs with their share of the CPUs.
_INITIAL = {Shape(1, WHOLE_MILLI, None, None): 1.0}


class Demand:
    """Counts of requested shapes, with exponential decay."""

    def __init__(self) -> None:
        self._counts: dict[Shape, float] = {}
        self._total = 0.0
        self._new: dict[Shape, int] = {}  # since the last comparison
        self._new_total = 0
        self._modelled: dict[Shape, float] = {}  # the fraction of requests with each shape, in the potential
        self.potential = potential_for(_INITIAL)

    @property
    def known(self) -> int:
        """The number of counts in memory; a shape may have an old and a new one."""
        return len(self._counts) + len(self._new)

    def count(self, shape: Shape) -> float:
        """The decayed count of requests for the shape up to the last comparison."""
        return self._counts.get(target_of(shape), 0.0)

    def add(self, shape: Shape) -> bool:
        """Count one request. Returns whether `potential` has changed."""
        target = target_of(shape)
        self._new[target] = self._new.get(target, 0) + 1
        self._new_total += 1
        due = max(_FIRST_COMPARE_AFTER, _COMPARE_AFTER * self._total)
        if self._new_total < due and len(self._new) < MAX_KNOWN:
            return False
        self._merge_counts()
        fractions = {shape: count / self._total for shape, count in self._counts.items()}
        if _distance(fractions, self._modelled) < _REBUILD_DISTANCE:
            return False
        self._modelled = fractions
        self.potential = potential_for(self._counts)
        return True

    def _merge_counts(self) -> None:
        decay = 0.5 ** (self._new_total / HALF_LIFE)
        counts = {shape: count * decay for shape, count in self._counts.items()}
        for shape, count in self._new.items():
            counts[shape] = counts.get(shape, 0.0) + count
        self._counts = dict(_most_requested(counts, MAX_KNOWN))
        self._total = sum(self._counts.values())
        self._new, self._new_total = {}, 0


def potential_for(counts: Mapping[Shape, float]) -> Potential:
    """The potential for this mix of requests. Without counts, no state has waste."""
    known = _most_requested(counts, MAX_KNOWN)
    targets = [
        Target(shape, TARGET_WEIGHT * weight, TARGET_WEIGHT * weight)
        for shape, weight in _most_requested(_weights(known), _MAX_TARGETS)
    ]
    shares: dict[int, float] = {}
    for shape, count in known:
        if shape.share:
            shares[shape.gpu_milli] = shares.get(shape.gpu_milli, 0.0) + count
    return Potential(targets, free_milli_values(shares), 1.0 if shares else 0.0)


@lru_cache(maxsize=4096)
def target_of(shape: Shape) -> Shape:
    """The shape without memory, which hardly ever affects waste, and without the owner, which never does."""
    return replace(shape, memory_mib=0, owner="")


def _weights(counts: Iterable[tuple[Shape, float]]) -> dict[Shape, float]:
    """The fraction of the expected waste that each target accounts for; the fractions add up to 1."""
    with_gpus = [(shape, count) for shape, count in counts if shape.gpus]
    raw = {shape: count * (shape.gpu_milli / WHOLE_MILLI) ** FRACTION_EXPONENT for shape, count in with_gpus}
    total = sum(raw.values())
    return {shape: weight / total for shape, weight in raw.items()}


def _distance(a: Mapping[Shape, float], b: Mapping[Shape, float]) -> float:
    """The fraction of requests whose shape differs between the two (total variation distance)."""
    return 0.5 * sum(abs(a.get(shape, 0.0) - b.get(shape, 0.0)) for shape in sorted({*a, *b}, key=_key))


def _most_requested(counts: Mapping[Shape, float], limit: int) -> list[tuple[Shape, float]]:
    """The highest counts first, in a deterministic order."""
    return sorted(counts.items(), key=lambda item: (-item[1], _key(item[0])))[:limit]


def _key(shape: Shape) -> tuple[object, ...]:
    cpu_milli = -1 if shape.cpu_milli is None else shape.cpu_milli
    return shape.gpus, shape.gpu_milli, cpu_milli, tuple(sorted(shape.models))
