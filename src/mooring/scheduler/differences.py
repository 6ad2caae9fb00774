"""Finds what differs between two long sequences that have most of their objects in common."""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import indexOf, is_
from typing import Final, TypeVar

Item = TypeVar("Item")

_DIFFERENT: Final = False


def differences(before: Sequence[Item], after: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return the objects that are only in `before`, and those that are only in `after`, by identity.

    A long queue mostly grows at its end or loses its first members, which is found without a look at each of
    its objects in Python.
    """
    shorter = min(len(before), len(after))
    start = _common(before, after, shorter)
    end = _common(reversed(before), reversed(after), shorter - start)
    old = {id(each): each for each in before[start : len(before) - end]}
    new = {id(each): each for each in after[start : len(after) - end]}
    return [old[each] for each in old.keys() - new.keys()], [new[each] for each in new.keys() - old.keys()]


def _common(first: Iterable[Item], second: Iterable[Item], most: int) -> int:
    """How many objects at the beginning are the same, `most` at most."""
    same = map(is_, first, islice(second, most))
    try:
        return indexOf(same, _DIFFERENT)
    except ValueError:
        return most
