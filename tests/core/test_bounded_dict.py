"""`BoundedDict`."""

from mooring.core.bounded_dict import BoundedDict


def test_a_new_key_clears_a_full_dict() -> None:
    cache: BoundedDict[int, int] = BoundedDict(3)
    for number in range(3):
        cache[number] = number
    assert cache == {0: 0, 1: 1, 2: 2}
    cache[2] = 3
    assert cache == {0: 0, 1: 1, 2: 3}
    cache[3] = 3
    assert cache == {3: 3}
