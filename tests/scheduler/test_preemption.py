"""Which instances are preempted for which requests, and that none is without effect."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import event, given, settings

from mooring.core.policy import Policy
from mooring.scheduler.feasibility.filters import fits
from mooring.scheduler.model import (
    NodeView,
    ProjectView,
    Request,
    ReservedPeriod,
    Running,
    Snapshot,
)
from mooring.scheduler.node_changes import without
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.schedule import schedule
from tests.scheduler.backfill.test_planner import at, placed, running, waits
from tests.scheduler.busy import NOW, after, rebuilt, snapshots, time_after_evictions
from tests.scheduler.clusters import H100, gpus, node

FOUR = node("n1", gpus(H100, 4))
SPOT: dict[str, Any] = {"preemptible": True, "priority": 30}
URGENT = waits("urgent", 2, priority=70)


def evicted(plan: SchedulingPlan) -> list[str]:
    return [each.instance_id for each in plan.evictions]


def full(*spots: Mapping[str, Any], where: NodeView = FOUR) -> NodeView:
    """The node with an instance of one GPU for each of these."""
    for place, changes in enumerate(spots):
        where = running(where, place, ends_in=None, **changes)
    return where


def test_a_lower_priority_is_preempted() -> None:
    plan = schedule(at([full(*[SPOT] * 4)], URGENT))
    assert len(plan.evictions) == 2
    assert plan.evictions[0].for_instance_id == "urgent"
    assert {each.because for each in plan.evictions} == {"priority"}
    assert plan.forecasts[0].instance_id == "urgent"
    assert set(plan.forecasts[0].waits_for) == set(evicted(plan))


@pytest.mark.parametrize(
    ("changes", "preempted"),
    [
        ({}, True),
        ({"preemptible": False}, False),
        ({"priority": 70}, False),
        ({"since": NOW - 299}, False),
        ({"since": NOW - 300}, True),
        ({"stopping": True}, False),
    ],
)
def test_which_instances_are_preempted(changes: dict[str, Any], *, preempted: bool) -> None:
    plan = schedule(at([full(*[SPOT | changes] * 4)], URGENT))
    assert bool(plan.evictions) == preempted


@pytest.mark.parametrize(("begins_in", "preempted"), [(100, False), (110, True)])
def test_no_preemption_if_a_reservation_starts_too_early(begins_in: int, *, preempted: bool) -> None:
    """The victims have stopped after 30 s; the request then takes 50 s and 30 s of overhead."""
    period = ReservedPeriod("r1", "others", NOW + begins_in, NOW + 600)
    spots = full(*[SPOT] * 4)
    kept = replace(spots, gpus=tuple(replace(gpu, reserved=(period,)) for gpu in spots.gpus))
    plan = schedule(at([kept], replace(URGENT, max_duration_s=50)))
    assert bool(plan.evictions) == preempted


def test_an_equal_priority_is_not_preempted() -> None:
    equal = SPOT | {"priority": 70, "since": NOW - 400}
    plan = schedule(at([full(equal, equal, equal, SPOT)], replace(URGENT, gpu_count=1)))
    assert evicted(plan) == ["r3-n1"]


def test_no_preemption_for_a_request_that_fits() -> None:
    plan = schedule(at([full(SPOT, SPOT)], URGENT))
    assert (evicted(plan), placed(plan)) == ([], {"urgent": "n1"})


def test_no_preemption_for_a_request_that_would_still_not_fit() -> None:
    not_preemptible = {"preemptible": False}
    assert not schedule(at([full(SPOT, not_preemptible, not_preemptible, not_preemptible)], URGENT)).evictions


def test_no_further_preemption_while_enough_is_stopping() -> None:
    stopping = SPOT | {"stopping": True, "ends_at": NOW + 20}
    plan = schedule(at([full(stopping, stopping, SPOT, SPOT)], URGENT))
    assert evicted(plan) == []
    assert plan.forecasts[0].instance_id == "urgent"
    second = node("n2", gpus(H100, 4, on="n2"))
    nodes = [full(stopping, stopping, SPOT, SPOT), full(*[SPOT] * 4, where=second)]
    later = at(nodes, URGENT, waits("another", 1, priority=60, ahead=-50))
    assert [each.node_id for each in schedule(later).evictions] == ["n2"]


def test_gpus_that_are_being_freed_are_not_taken_by_another() -> None:
    """The node already has a free GPU; the small request would delay the urgent one."""
    stopping = SPOT | {"stopping": True, "ends_at": NOW + 20}
    plan = schedule(at([full(stopping, {}, {})], URGENT, waits("small", 1)))
    assert not plan.placements


def test_the_fewest_victims() -> None:
    two_gpus = running(node("n2", gpus(H100, 2, on="n2")), 0, 1, ends_in=None, **SPOT, since=NOW - 9000)
    assert evicted(schedule(at([full(*[SPOT] * 4), two_gpus], URGENT))) == ["r0-n2"]


def test_of_equally_many_victims_those_with_the_least_lost_work() -> None:
    young, old = SPOT | {"since": NOW - 400}, SPOT | {"since": NOW - 9000}
    assert evicted(schedule(at([full(old, young, old, young)], URGENT))) == ["r1-n1", "r3-n1"]


def test_all_members_of_a_gang_count_as_victims() -> None:
    of_gang = SPOT | {"group_id": "g", "since": NOW - 1000}
    alone = SPOT | {"since": NOW - 1500}
    plan = schedule(at([full(of_gang, of_gang, of_gang, alone)], replace(URGENT, gpu_count=1)))
    assert evicted(plan) == ["r3-n1"]


def test_each_member_of_a_gang_counts_once() -> None:
    """Three of four must stop: the members of the gang, each of which loses less than the single one."""
    of_gang = SPOT | {"group_id": "g", "since": NOW - 1000}
    alone = SPOT | {"since": NOW - 1500}
    plan = schedule(at([full(of_gang, of_gang, of_gang, alone)], replace(URGENT, gpu_count=3)))
    assert evicted(plan) == ["r0-n1", "r1-n1", "r2-n1"]


def test_members_on_other_nodes_count_as_victims() -> None:
    """To evict two single instances stops fewer than to evict one with two gang members elsewhere."""
    where = node("n1", gpus(H100, 2))
    wide = running(where, 0, 1, ends_in=None, **SPOT, group_id="g")
    others = full(*[SPOT | {"group_id": "g"}] * 2, where=node("n2", gpus("Tesla T4", 2, on="n2")))
    alone = full(SPOT, SPOT, where=node("n3", gpus(H100, 2, on="n3")))
    pending = replace(URGENT, gpu_models=("H100",))
    assert set(evicted(schedule(at([wide, others, alone], pending)))) == {"r0-n3", "r1-n3"}
    assert evicted(schedule(at([wide, others], pending))) == ["r0-n1"]


def test_of_two_gangs_only_one_is_preempted() -> None:
    a, b = SPOT | {"group_id": "a"}, SPOT | {"group_id": "b", "since": NOW - 400}
    plan = schedule(at([full(a, b, a, b)], URGENT))
    assert evicted(plan) in (["r0-n1", "r2-n1"], ["r1-n1", "r3-n1"])


def test_a_reclaimed_gang_counts_whole_against_the_borrowed_gpus() -> None:
    """All members stop with the first one, so that the other project has no borrowed GPUs left."""
    other = SPOT | {"preemptible": False, "project_id": "other"}
    one, two = node("n1", gpus(H100, 1)), node("n2", gpus(H100, 1, on="n2"))
    nodes = [full(other | {"group_id": "g"}, where=each) for each in (one, two)]
    nodes.append(full(other, where=node("n3", gpus(H100, 1, on="n3"))))
    pending = [waits(name, 1, project_id="owner") for name in ("first", "second")]
    projects = {
        "owner": ProjectView(guaranteed_gpu_milli=2000),
        "other": ProjectView(guaranteed_gpu_milli=1000),
    }
    plan = schedule(replace(at(nodes, *pending), projects=projects))
    assert evicted(plan)[0] == "r0-n3"
    gang_only = schedule(replace(at(nodes[:2], *pending), projects=projects))
    assert len(evicted(gang_only)) == 1


def test_gpus_of_a_stopping_gang_serve_the_next_request_first() -> None:
    member = SPOT | {"group_id": "g"}
    nodes = [
        full(member, where=node("n1", gpus(H100, 1))),
        full(member, where=node("n2", gpus("Tesla T4", 1, on="n2"))),
        full(SPOT | {"since": NOW - 400}, where=node("n3", gpus("Tesla T4", 1, on="n3"))),
    ]
    first = replace(URGENT, gpu_count=1, gpu_models=("H100",), priority=80)
    plan = schedule(at(nodes, first, waits("second", 1, priority=70)))
    assert evicted(plan) == ["r0-n1", "r0-n2"]


def test_two_requests_have_separate_victims() -> None:
    plan = schedule(at([full(*[SPOT] * 4), full(*[SPOT] * 4, where=node("n2", gpus(H100, 4, on="n2")))],
                       URGENT, waits("second", 2, priority=60)))  # fmt: skip
    by_unit = {
        name: {e.node_id for e in plan.evictions if e.for_instance_id == name}
        for name in ("urgent", "second")
    }
    assert len(plan.evictions) == 4
    assert by_unit["urgent"] != by_unit["second"]


def _plan_for_owner(guaranteed: int | None, borrower: int | None, *spots: dict[str, Any]) -> SchedulingPlan:
    """The plan if a project needs two of the four GPUs of a node, all of which another project uses."""
    others = [{"project_id": "other"} | each for each in spots]
    snapshot = at([full(*others)], replace(URGENT, project_id="owner", priority=50))
    projects = {
        "owner": ProjectView(guaranteed_gpu_milli=guaranteed),
        "other": ProjectView(guaranteed_gpu_milli=borrower),
    }
    return schedule(replace(snapshot, projects=projects))


def test_a_project_reclaims_borrowed_gpus_within_its_guarantee() -> None:
    plan = _plan_for_owner(2000, None, {}, {}, {}, {})
    assert len(plan.evictions) == 2
    assert {each.because for each in plan.evictions} == {"reclaim"}


@pytest.mark.parametrize(
    ("guaranteed", "borrower", "count"),
    [
        (None, None, 0),  # no guarantee
        (1000, None, 0),  # the request exceeds the guarantee
        (2000, 4000, 0),  # the other project is guaranteed all that it uses
        (2000, 3000, 0),  # only one GPU is borrowed
        (2000, 2000, 2),
    ],
)
def test_only_borrowed_gpus_are_reclaimed_and_only_within_the_guarantee(
    guaranteed: int | None, borrower: int | None, count: int
) -> None:
    assert len(_plan_for_owner(guaranteed, borrower, {}, {}, {}, {}).evictions) == count


def test_placements_beyond_a_guarantee_are_marked_as_borrowed() -> None:
    snapshot = at([FOUR], *(waits(f"i{number}", 1) for number in range(3)))
    projects = {"p": ProjectView(guaranteed_gpu_milli=2000), "q": ProjectView(guaranteed_gpu_milli=1000)}
    plan = schedule(replace(snapshot, projects=projects))
    assert [each.borrowed for each in plan.placements] == [False, False, True]
    assert not any(each.borrowed for each in schedule(snapshot).placements)


# ---- properties


@settings(deadline=None, max_examples=40)
@given(snapshots(requests_at_most=1))
def test_the_number_of_victims_is_minimal(snapshot: Snapshot) -> None:
    """By brute force over all nodes, for a single pending request."""
    if snapshot.requests[-1].gang is not None:
        return
    (request,) = snapshot.requests
    plan = schedule(replace(snapshot, projects={}))
    if plan.placements or (plan.forecasts and not plan.evictions):
        return
    fewest = min(
        (
            len(_stopped(snapshot, chosen))
            for each in snapshot.nodes
            for size in range(1, len(each.running) + 1)
            for chosen in combinations(_candidates(snapshot, each, request), size)
            if fits(without(each, chosen), request, time_after_evictions(snapshot))
        ),
        default=0,
    )
    event(f"fewest: {fewest}")
    running_instances = [run for each in snapshot.nodes for run in each.running]
    victims = [run for run in running_instances if run.instance_id in evicted(plan)]
    assert len(_stopped(snapshot, victims)) == fewest


def _stopped(snapshot: Snapshot, victims: Collection[Running]) -> set[str]:
    """The victims and the other members of their gangs."""
    groups = {run.group_id for run in victims if run.group_id}
    other_members = (run for each in snapshot.nodes for run in each.running if run.group_id in groups)
    return {run.instance_id for run in (*victims, *other_members) if not run.stopping}


def _candidates(snapshot: Snapshot, where: NodeView, request: Request) -> list[Running]:
    return [
        run
        for run in where.running
        if run.preemptible
        and run.priority < request.priority
        and not run.stopping
        and snapshot.now - run.since >= snapshot.policy.preemption_min_run_s
    ]


@settings(deadline=None, max_examples=40)
@given(snapshots())
def test_freed_gpus_go_to_the_request_that_preempted(snapshot: Snapshot) -> None:
    """The next cycle evicts no more for the request while the victims stop; then the request starts."""
    plan = schedule(replace(snapshot, policy=Policy(preemption_min_run_s=0)))
    if not plan.evictions or any(each.gang for each in snapshot.requests):
        return
    gone = {each.instance_id for each in plan.evictions}
    placed_now = {each.instance_id for each in plan.placements}
    left = tuple(each for each in snapshot.requests if each.instance_id not in placed_now)
    nodes_after = after(snapshot, plan).nodes.values()
    stopping = tuple(
        replace(
            each, running=tuple(_stopping(run) if run.instance_id in gone else run for run in each.running)
        )
        for each in nodes_after
    )
    # A request with a slot keeps its position, although the share of a victim's project becomes smaller.
    later = replace(snapshot, requests=left, with_slots=frozenset(plan.with_slots))
    second = schedule(replace(later, nodes=stopping))
    preemptors = {each.for_instance_id for each in plan.evictions}
    assert not preemptors & {each.for_instance_id for each in second.evictions}
    stopped = tuple(
        rebuilt(each, [run for run in each.running if run.instance_id not in gone]) for each in stopping
    )
    last = replace(later, nodes=stopped, with_slots=frozenset(second.with_slots))
    placed_last = {each.instance_id for each in schedule(last).placements}
    assert preemptors <= placed_last


def _stopping(run: Running) -> Running:
    return replace(run, stopping=True, ends_at=NOW + 5)
