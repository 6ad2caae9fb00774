"""`differences` finds what two sequences do not have in common, by identity."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mooring.scheduler.differences import differences


@given(st.lists(st.integers(0, 30), unique=True), st.randoms(use_true_random=False))
def test_differences_are_those_of_the_sets(present: list[int], random: Random) -> None:
    objects = {number: [number] for number in range(31)}
    before = [objects[number] for number in present]
    after = [each for each in before if random.random() < 0.8]
    for number in random.sample(range(31), 4):
        if objects[number] not in after:
            after.insert(random.choice([0, len(after), random.randint(0, len(after))]), objects[number])
    gone, new = differences(before, after)
    assert sorted(gone) == sorted(each for each in before if each not in after)
    assert sorted(new) == sorted(each for each in after if each not in before)


def test_equal_objects_are_different() -> None:
    before, after = [[1], [2]], [[1], [2]]
    assert differences(before, after) == (before, after)
    assert differences(before, before) == ([], [])
