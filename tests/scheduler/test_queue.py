"""The order of the queue and the reasons for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from mooring.core.policy import Policy
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.forecasts import queue_order
from mooring.scheduler.model import ProjectView, Request, ResourceUsage, Snapshot
from mooring.scheduler.schedule import schedule
from tests.scheduler.backfill.test_planner import at, placed, running
from tests.scheduler.busy import NOW, snapshots
from tests.scheduler.clusters import H100, gpus, node, request

FULL = running(node("n1", gpus(H100, 4)), 0, 1, 2, 3, ends_in=None, project_id="busy")
WEEK = 7 * 86_400.0


def waiting(instance_id: str, project: str = "p", ago: float = 100, **changes: Any) -> Request:
    pending = request(1, instance_id=instance_id, queued_at=NOW - ago, project_id=project)
    return replace(pending, **changes)


def order(snapshot: Snapshot) -> list[str]:
    """The ids in the order of the queue, in a cluster where nothing fits."""
    queue = list(queue_order(snapshot).instance_ids)
    # Nothing fits, so that the order does not change during the cycle.
    assert queue == list(schedule(snapshot).order)
    return queue


def test_priority_comes_first_and_age_last() -> None:
    pending = (
        waiting("young", ago=1),
        waiting("old"),
        waiting("urgent", ago=1, priority=51),
        waiting("late", priority=49),
    )
    snapshot = at([FULL], *pending)
    assert order(snapshot) == ["urgent", "old", "young", "late"]
    ahead = queue_order(snapshot).ahead("late")
    assert [(each.instance_id, each.because) for each in ahead] == [
        ("urgent", "priority"),
        ("old", "priority"),
        ("young", "priority"),
    ]
    assert [each.because for each in queue_order(snapshot).ahead("young")] == ["priority", "age"]
    assert queue_order(snapshot).position("young") == 3


def test_an_overdue_request_precedes_fair_share() -> None:
    pending = (
        waiting("overdue", "busy", ago=90_000),
        waiting("fair", "idle"),
        waiting("urgent", "busy", priority=51),
    )
    snapshot = at([FULL], *pending)
    assert order(snapshot) == ["urgent", "overdue", "fair"]
    assert [each.because for each in queue_order(snapshot).ahead("fair")] == ["priority", "overdue"]
    not_overdue = at([FULL], *pending, policy=Policy(overdue_after_s=100_000))
    assert order(not_overdue) == ["urgent", "fair", "overdue"]


def test_the_project_with_fewer_gpus_comes_first() -> None:
    snapshot = at([FULL], waiting("more", "busy", ago=500), waiting("less", "idle"))
    assert order(snapshot) == ["less", "more"]
    assert [each.because for each in queue_order(snapshot).ahead("more")] == ["fair_share"]


def test_a_request_with_a_slot_keeps_its_position_when_fair_shares_change() -> None:
    full = running(node("n1", gpus(H100, 4)), 0, 1, 2, 3, ends_in=600, project_id="busy")
    pending = waiting("first", "p", ago=500), waiting("second", "q")
    before = at([full], *pending)
    plan = schedule(before)
    assert (plan.order, plan.with_slots) == (("first", "second"), ("first",))
    after_usage_of_p = replace(before, projects={"p": ProjectView(used=ResourceUsage(gpu_s=WEEK))})
    assert order(after_usage_of_p) == ["second", "first"]
    with_slot = replace(after_usage_of_p, with_slots=frozenset(plan.with_slots))
    assert order(with_slot) == ["first", "second"]
    assert [each.because for each in queue_order(with_slot).ahead("second")] == ["promised"]
    projects = {"p": ProjectView(used=ResourceUsage(gpu_s=WEEK)), "q": ProjectView(guaranteed_gpu_milli=1000)}
    assert order(replace(with_slot, projects=projects)) == ["second", "first"]


@pytest.mark.parametrize(
    ("projects", "first"),
    [
        ({"a": ProjectView(used=ResourceUsage(gpu_s=1e6))}, "b"),
        (
            {
                "a": ProjectView(used=ResourceUsage(gpu_s=1e6)),
                "b": ProjectView(used=ResourceUsage(gpu_s=2e6)),
            },
            "a",
        ),
        (
            {
                "a": ProjectView(weight=3, used=ResourceUsage(gpu_s=2e6)),
                "b": ProjectView(used=ResourceUsage(gpu_s=1e6)),
            },
            "a",
        ),
        # A tenth of the CPUs counts less than half of the memory.
        (
            {
                "a": ProjectView(used=ResourceUsage(cpu_s=6.4 * WEEK)),
                "b": ProjectView(used=ResourceUsage(memory_mib_s=2e5 * WEEK)),
            },
            "a",
        ),
        ({"b": ProjectView(guaranteed_gpu_milli=1000, used=ResourceUsage(gpu_s=9e6))}, "b"),
        ({"b": ProjectView(guaranteed_gpu_milli=0, used=ResourceUsage(gpu_s=9e6))}, "a"),
    ],
)
def test_which_of_two_projects_comes_first(projects: dict[str, ProjectView], first: str) -> None:
    snapshot = replace(at([FULL], waiting("a", "a"), waiting("b", "b")), projects=projects)
    assert order(snapshot)[0] == first


def test_a_gpu_guarantee_does_not_help_cpu_requests() -> None:
    pending = (waiting("gpus", "a"), waiting("cpus", "b", gpu_count=0, cpu_milli=10**6))
    projects = {"b": ProjectView(guaranteed_gpu_milli=1000, used=ResourceUsage(gpu_s=9e6))}
    assert order(replace(at([FULL], *pending), projects=projects)) == ["gpus", "cpus"]


def test_fair_shares_are_updated_while_placing() -> None:
    """`a0` is the oldest; then the projects alternate, since each placement raises a share."""
    pending = [waiting(f"a{number}", "a", ago=200 - number) for number in range(4)]
    pending += [waiting(f"b{number}", "b", ago=100 - number) for number in range(4)]
    plan = schedule(at([node("n1", gpus(H100, 4))], *pending))
    assert [each.instance_id for each in plan.placements] == ["a0", "b0", "a1", "b1"]


def test_a_placement_counts_against_all_requests_of_its_project() -> None:
    pending = (
        waiting("gpu", "a", ago=300),
        waiting("cpu", "a", ago=200, gpu_count=0),
        waiting("other", "b"),
    )
    plan = schedule(at([node("n1", gpus(H100, 4))], *pending))
    assert [each.instance_id for each in plan.placements] == ["gpu", "other", "cpu"]


def test_a_project_with_a_higher_weight_gets_more() -> None:
    pending = [waiting(f"{project}{number}", project) for project in "ab" for number in range(6)]
    snapshot = replace(at([node("n1", gpus(H100, 6))], *pending), projects={"a": ProjectView(weight=2)})
    assert sum(name.startswith("a") for name in placed(schedule(snapshot))) == 4


def test_an_unknown_instance_has_no_position() -> None:
    with pytest.raises(ValueError, match="not in"):
        queue_order(at([FULL], waiting("a"))).position("b")


@settings(deadline=None, max_examples=20)
@given(snapshots())
def test_every_request_is_in_the_queue_once(snapshot: Snapshot) -> None:
    cache = CycleCache()
    schedule(snapshot, cache)
    queue = queue_order(snapshot, cache)
    assert sorted(queue.instance_ids) == sorted(each.instance_id for each in snapshot.requests)
    ranks = [queue.rank(index) for index in range(len(queue.units))]
    assert ranks == sorted(ranks)
    assert queue == queue_order(snapshot)
