"""The order of the pending instances, their positions, and the rule that puts one ahead of another."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import Literal

from mooring.scheduler.units import Age, Unit

# `promised`: the unit has a backfill slot.
Because = Literal["priority", "overdue", "guarantee", "promised", "fair_share", "age"]
_RULES: tuple[Because, ...] = ("priority", "overdue", "guarantee", "promised", "fair_share", "age")
Standing = tuple[int, int, int, int, float]  # a value for each of the rules, without the age
Rank = tuple[int, int, int, int, float, Age]
_FEW = 100  # units that are inserted one by one faster than thousands are sorted
Segment = tuple[tuple[Age, ...], tuple[Unit, ...]]  # equal units and their ages, the oldest first


@dataclass(frozen=True, slots=True)
class Ahead:
    """An instance ahead of another in the queue, and the first rule that decides it."""

    instance_id: str
    because: Because


@dataclass(frozen=True)
class QueueOrder:
    """The pending units in queue order. Computed when it is first read: it may have thousands of units.

    Attributes:
        segments: of each standing, in their order.
    """

    segments: tuple[tuple[Standing, tuple[Segment, ...]], ...] = ()

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return tuple(chain.from_iterable(_merged(segments) for _standing, segments in self.segments))

    @cached_property
    def instance_ids(self) -> tuple[str, ...]:
        """The members of a gang are adjacent."""
        return tuple(member.instance_id for unit in self.units for member in unit.members)

    @cached_property
    def positions(self) -> Sequence[int]:
        """The position of the first member of each unit, from 1; then that after the last member."""
        if all(units[0].gang is None for _standing, segments in self.segments for _ages, units in segments):
            return range(1, len(self.units) + 2)
        return list(accumulate((len(unit.members) for unit in self.units), initial=1))

    @cached_property
    def _ends(self) -> Sequence[int]:
        """The index in `units` after the last unit of each standing."""
        counts = (sum(len(units) for _ages, units in segments) for _standing, segments in self.segments)
        return list(accumulate(counts))

    def rank(self, index: int) -> Rank:
        """The rank of `units[index]`."""
        standing, _segments = self.segments[bisect_right(self._ends, index)]
        return (*standing, self.units[index].age)

    def position(self, instance_id: str) -> int:
        """The position from 1. Raises ValueError if the instance is not pending."""
        return self.instance_ids.index(instance_id) + 1

    def ahead(self, instance_id: str, most: int = 20) -> tuple[Ahead, ...]:
        """The first `most` instances ahead of it, without its own gang, and the rule that puts each there."""
        own = bisect_right(self.positions, self.position(instance_id)) - 1
        rank = self.rank(own)
        others = (
            Ahead(member.instance_id, because(self.rank(index), rank))
            for index in range(own)
            for member in self.units[index].members
        )
        return tuple(islice(others, most))


def _merged(segments: Sequence[Segment]) -> Sequence[Unit]:
    longest, *others = sorted(segments, key=lambda segment: -len(segment[0]))
    if not others:
        return longest[1]
    if sum(len(ages) for ages, _units in others) > _FEW:
        pairs = chain.from_iterable(zip(ages, units, strict=True) for ages, units in segments)
        return [unit for _age, unit in sorted(pairs, key=itemgetter(0))]
    ages, units = list(longest[0]), list(longest[1])
    for age, unit in chain.from_iterable(
        zip(few_ages, few_units, strict=True) for few_ages, few_units in others
    ):
        place = bisect_left(ages, age)
        ages.insert(place, age)
        units.insert(place, unit)
    return units


def because(first: Rank, second: Rank) -> Because:
    """The rule that puts the first ahead of the second."""
    return next(name for name, a, b in zip(_RULES, first, second, strict=True) if a != b)
