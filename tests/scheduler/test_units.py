"""Pending units that are updated by differences, and equal units that are decided together."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import Request, Snapshot
from mooring.scheduler.queue import SchedulingQueue
from mooring.scheduler.schedule import schedule
from mooring.scheduler.units import PendingUnits
from tests.scheduler.busy import snapshots

few_examples = settings(deadline=None, max_examples=40)
SNAPSHOTS = snapshots()
RANDOM = st.randoms(use_true_random=False)


def _with_twins(snapshot: Snapshot, random: Random) -> Snapshot:
    """Each request that is not of a gang several times, with other ages."""
    twins = [
        replace(each, instance_id=f"{each.instance_id}-{number}", queued_at=each.queued_at - number)
        for each in snapshot.requests
        if each.gang is None
        for number in range(random.randrange(4))
    ]
    return replace(snapshot, requests=(*snapshot.requests, *twins))


def _contents(requests: Sequence[Request], units: PendingUnits) -> Sequence[object]:
    units.update(requests)
    return sorted((equal.ages, equal.ids, equal.queued, len(equal.units)) for equal in units)


@few_examples
@given(SNAPSHOTS, RANDOM)
def test_differences_lead_to_the_same_units_as_a_new_start(snapshot: Snapshot, random: Random) -> None:
    everything = list(_with_twins(snapshot, random).requests)
    units = PendingUnits()
    for _ in range(5):
        some = random.sample(everything, random.randint(0, len(everything)))
        present = tuple(
            each if each.gang else replace(each, priority=random.choice([50, 60])) for each in some
        )
        assert _contents(present, units) == _contents(present, PendingUnits())


@few_examples
@given(SNAPSHOTS, RANDOM)
def test_leaving_out_equal_units_changes_no_decision(snapshot: Snapshot, random: Random) -> None:
    snapshot = _with_twins(snapshot, random)
    plan = schedule(snapshot)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SchedulingQueue, "drop", lambda _queue, _unit: None)
        full = schedule(snapshot)
    assert plan == full
    assert plan.unplaced == full.unplaced


@few_examples
@given(SNAPSHOTS, RANDOM)
def test_a_plan_does_not_depend_on_earlier_queues(snapshot: Snapshot, random: Random) -> None:
    snapshot, cache = _with_twins(snapshot, random), CycleCache()
    for _ in range(3):
        some = tuple(random.sample(snapshot.requests, random.randint(0, len(snapshot.requests))))
        assert schedule(replace(snapshot, requests=some), cache) == schedule(replace(snapshot, requests=some))
