"""Backfill slots of pending requests, and what may start ahead of them."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from mooring.core.policy import Policy
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.forecasts import Forecasts, max_duration_now
from mooring.scheduler.model import (
    Forecast,
    GpuAllocation,
    NodeView,
    Placement,
    Request,
    ReservedPeriod,
    Running,
    Snapshot,
)
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.schedule import SchedulingCycle, schedule
from tests.scheduler.busy import NOW, after, rebuilt, snapshots, with_running
from tests.scheduler.clusters import H100, gpus, node, request

OVERHEAD = Policy().start_overhead_s


def running(where: NodeView, *places: int, ends_in: float | None, **changes: Any) -> NodeView:
    """The node with an instance on these GPUs."""
    allocations = tuple(GpuAllocation(where.gpus[place].uuid) for place in places)
    instance_id = f"r{len(where.running)}-{where.id}"
    ends_at = None if ends_in is None else NOW + ends_in
    instance = Running(
        instance_id, "p", allocations, 1000, 1024, 50, preemptible=False, since=NOW - 4000, ends_at=ends_at
    )
    return with_running(where, replace(instance, **changes))


def waits(instance_id: str, count: int, ahead: float = 0, **changes: Any) -> Request:
    pending = request(count, instance_id=instance_id, queued_at=NOW - 100 - ahead, project_id="p")
    return replace(pending, **changes)


def at(nodes: list[NodeView], *pending: Request, policy: Policy | None = None) -> Snapshot:
    return Snapshot(tuple(nodes), pending, now=NOW, policy=policy or Policy())


def placed(plan: SchedulingPlan) -> dict[str, str]:
    return {each.instance_id: each.node_id for each in plan.placements}


FOUR = node("n1", gpus(H100, 4))
HALF = running(FOUR, 0, 1, ends_in=600)  # two GPUs are free now, the other two in ten minutes
HEAD = waits("head", 4, ahead=10)


def test_the_first_request_that_does_not_fit_gets_a_slot_at_the_declared_end() -> None:
    plan = schedule(at([HALF], HEAD))
    assert plan.forecasts == (Forecast("head", NOW + 600 + OVERHEAD, ("n1",), ("r0-n1",)),)


def test_a_reservation_takes_precedence_over_backfill_slots() -> None:
    period = ReservedPeriod("r1", "owner", NOW - 1, NOW + 3600)
    reserved = replace(FOUR, gpus=tuple(replace(gpu, reserved=(period,)) for gpu in FOUR.gpus))
    first = waits("first", 2, ahead=10)
    own = waits("own", 4, project_id="owner")  # declares no end
    plan = schedule(replace(at([reserved], first, own), with_slots=frozenset({"first"})))
    assert [each.starts_at for each in schedule(at([reserved], first)).forecasts] == [NOW + 3600]
    assert placed(plan) == {"own": "n1"}


@pytest.mark.parametrize(
    ("seconds", "starts"), [(570, True), (600, True), (601, False), (6000, False), (None, False)]
)
def test_a_later_request_starts_only_if_it_ends_before_the_slot(seconds: int | None, *, starts: bool) -> None:
    plan = schedule(at([HALF], HEAD, waits("small", 1, max_duration_s=seconds)))
    assert ("small" in placed(plan)) == starts
    assert plan.forecasts[0].starts_at == NOW + 600 + OVERHEAD


def test_a_later_request_gets_gpus_that_the_slot_does_not_need() -> None:
    three = replace(HEAD, gpu_count=3)
    plan = schedule(at([HALF], three, waits("small", 1), waits("other", 1)))
    assert placed(plan) == {"other": "n1"} or placed(plan) == {"small": "n1"}


def test_a_later_request_may_use_other_nodes() -> None:
    small = node("n2", gpus(H100, 2, on="n2"))
    plan = schedule(at([HALF, small], HEAD, waits("a", 1), waits("b", 1), waits("c", 1)))
    assert set(placed(plan).values()) == {"n2"}
    assert len(plan.placements) == 2
    assert plan.unplaced[-1].code == "waiting_for_turn"


def test_the_slot_is_on_the_node_with_the_earliest_start() -> None:
    sooner = running(node("n2", gpus(H100, 4, on="n2")), 0, ends_in=300)
    assert schedule(at([HALF, sooner], HEAD)).forecasts[0].node_ids == ("n2",)


def test_no_slot_behind_an_instance_without_a_declared_end() -> None:
    endless = running(FOUR, 0, ends_in=None)
    plan = schedule(at([endless], HEAD, waits("small", 1)))
    assert not plan.forecasts
    assert "small" in placed(plan)


def test_a_node_is_drained_for_an_overdue_request() -> None:
    endless = running(FOUR, 0, ends_in=None)
    overdue = replace(HEAD, queued_at=NOW - 90_000)
    plan = schedule(at([endless], overdue, waits("small", 1), waits("short", 1, max_duration_s=1)))
    assert not plan.placements
    assert plan.forecasts == (Forecast("head", None, ("n1",), ("r0-n1",)),)


def test_other_requests_may_use_what_an_overdue_one_does_not_need() -> None:
    endless = running(node("n1", gpus(H100, 6)), 0, 1, 2, ends_in=None)
    overdue = replace(HEAD, queued_at=NOW - 90_000)
    plan = schedule(at([endless], overdue, waits("two", 2), waits("more", 1)))
    assert set(placed(plan)) == {"two"} or set(placed(plan)) == {"more"}


def test_the_next_cycle_counts_what_started_beside_a_slot() -> None:
    """Otherwise one instance after another would start in the same place without end."""
    where = running(node("n1", gpus(H100, 4), cpus=6), 0, ends_in=None)
    overdue = replace(HEAD, queued_at=NOW - 90_000, cpu_milli=4000)
    snapshot = at([where], overdue, *(waits(name, 0, cpu_milli=2000) for name in ("first", "second")))
    plan = schedule(snapshot)
    assert len(plan.placements) == 1
    left = tuple(each for each in snapshot.requests if each.instance_id not in placed(plan))
    later = replace(snapshot, nodes=tuple(after(snapshot, plan).nodes.values()), requests=left)
    again = schedule(later)
    assert not again.placements
    assert again.forecasts == (Forecast("head", None, ("n1",), ("r0-n1",)),)


def test_no_slot_for_a_request_that_can_never_fit() -> None:
    never = waits("never", 5, ahead=20)
    plan = schedule(at([HALF], never, HEAD))
    assert [each.instance_id for each in plan.forecasts] == ["head"]


def test_no_slot_behind_an_instance_far_past_its_end() -> None:
    stuck = running(FOUR, 0, ends_in=-4000)
    assert not schedule(at([stuck], HEAD)).forecasts


def test_conservative_backfill_gives_every_request_a_slot() -> None:
    second = waits("second", 3, ahead=5, max_duration_s=50)
    pending = (replace(HEAD, max_duration_s=100), second, waits("third", 4))
    easy = schedule(at([HALF], *pending))
    assert [each.instance_id for each in easy.forecasts] == ["head"]
    plan = schedule(at([HALF], *pending, policy=Policy(backfill="conservative")))
    start_times = {each.instance_id: each.starts_at for each in plan.forecasts}
    first = NOW + 600 + OVERHEAD
    assert start_times["head"] == first
    assert start_times["second"] == first + 100 + OVERHEAD
    assert start_times["third"] == first + 150 + 2 * OVERHEAD


def forecast(snapshot: Snapshot, instance_id: str) -> Forecast:
    return Forecasts(snapshot, CycleCache()).of(instance_id)


@settings(deadline=None, max_examples=40)
@given(snapshots(), st.randoms(use_true_random=False))
def test_forecasts_do_not_depend_on_the_order_of_queries(snapshot: Snapshot, random: Random) -> None:
    forecasts = Forecasts(snapshot, CycleCache())
    pending = [request.instance_id for request in snapshot.requests]
    random.shuffle(pending)
    for instance_id in pending:
        assert forecasts.of(instance_id) == forecast(snapshot, instance_id)


@settings(deadline=None, max_examples=60)
@given(snapshots())
def test_without_a_suggested_duration_none_helps(snapshot: Snapshot) -> None:
    waiting = {each.instance_id for each in schedule(snapshot).unplaced}
    alone = [each for each in snapshot.requests if each.instance_id in waiting and each.gang is None]
    for single in alone:
        if max_duration_now(snapshot, single.instance_id) is None:
            for seconds in (1, 600, 3600):
                assert not _starts_with(snapshot, single, seconds)


def _starts_with(snapshot: Snapshot, single: Request, seconds: int) -> bool:
    shorter = replace(single, max_duration_s=min(seconds, single.max_duration_s or seconds))
    requests = tuple(shorter if each is single else each for each in snapshot.requests)
    return single.instance_id in placed(schedule(replace(snapshot, requests=requests)))


def test_the_forecast_includes_the_requests_ahead() -> None:
    pending = (replace(HEAD, max_duration_s=100), waits("second", 3, ahead=5))
    snapshot = at([HALF], *pending)
    assert forecast(snapshot, "head").starts_at == NOW + 600 + OVERHEAD
    assert forecast(snapshot, "second").starts_at == NOW + 700 + 2 * OVERHEAD
    assert forecast(at([HALF], pending[1]), "second").starts_at == NOW + 600 + OVERHEAD
    assert forecast(at([running(FOUR, 0, ends_in=None)], HEAD), "head").starts_at is None
    assert forecast(at([FOUR], HEAD), "head").starts_at == NOW


def test_the_longest_duration_that_starts_now() -> None:
    snapshot = at([HALF], HEAD, waits("small", 1))
    assert max_duration_now(snapshot, "small") == 600
    shorter = replace(snapshot, requests=(HEAD, waits("small", 1, max_duration_s=600)))
    assert "small" in placed(schedule(shorter))
    assert max_duration_now(at([HALF], HEAD, waits("large", 3)), "large") is None
    assert max_duration_now(snapshot, "head") is None


def test_the_longest_duration_ends_before_another_projects_reservation() -> None:
    reserved = ReservedPeriod("r1", "owner", NOW + 100, NOW + 600)
    where = replace(FOUR, gpus=tuple(replace(gpu, reserved=(reserved,)) for gpu in FOUR.gpus))
    assert max_duration_now(at([where], waits("small", 1)), "small") == 100 - OVERHEAD
    assert "small" in placed(schedule(at([where], waits("small", 1, max_duration_s=70))))
    assert "small" not in placed(schedule(at([where], waits("small", 1, max_duration_s=71))))
    own = waits("own", 1, project_id="owner", max_duration_s=6000)
    assert max_duration_now(at([where], own), "own") is None


@settings(deadline=None, max_examples=40)
@given(snapshots())
def test_later_requests_do_not_affect_earlier_ones(snapshot: Snapshot) -> None:
    """Backfilled or not, the last request of the queue changes nothing for the others."""
    cycle = SchedulingCycle(snapshot, CycleCache())
    plan = cycle.plan()
    assume(len(cycle.decided) > 1)
    last = {member.instance_id for member in cycle.decided[-1].members}
    left = tuple(each for each in snapshot.requests if each.instance_id not in last)
    without = schedule(replace(snapshot, requests=left))
    assert without.placements == tuple(each for each in plan.placements if each.instance_id not in last)
    assert without.forecasts == tuple(each for each in plan.forecasts if each.instance_id not in last)
    assert without.evictions == tuple(each for each in plan.evictions if each.for_instance_id not in last)
    event(f"forecasts: {bool(without.forecasts)}")


@pytest.mark.parametrize("declared", [True, False])
def test_small_requests_do_not_starve_a_large_one(*, declared: bool) -> None:
    """Two nodes with a constant surplus of small requests, from projects with a higher fair share."""
    policy = Policy(overdue_after_s=5000)
    nodes: tuple[NodeView, ...] = (FOUR, node("n2", gpus(H100, 4, on="n2")))
    cache = CycleCache()
    large = replace(waits("large", 4), queued_at=NOW, project_id="large")
    started: Placement | None = None
    queue: tuple[Request, ...] = ()
    for step in range(120):
        now = NOW + step * 100
        # Small instances end after five minutes, declared or not.
        nodes = tuple(rebuilt(each, [run for run in each.running if now - run.since < 300]) for each in nodes)
        for number in range(6):
            small = waits(f"s{step}-{number}", 1, project_id="small", queued_at=now)
            queue = (*queue, replace(small, max_duration_s=300 if declared else None))
        snapshot = Snapshot(nodes, (large, *queue), now=now, policy=policy)
        plan = schedule(snapshot, cache)
        got = {each.instance_id: each for each in plan.placements}
        nodes = tuple(after(snapshot, plan).nodes[each.id] for each in nodes)
        queue = tuple(each for each in queue if each.instance_id not in got)
        if started := got.get("large"):
            break
    assert started is not None
    assert now - NOW <= (400 if declared else 5000 + 400)
