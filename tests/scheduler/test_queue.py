"""The order of the queue and the reasons for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from mooring.core.policy import Policy
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.forecasts import line
from mooring.scheduler.model import ProjectView, Request, ResourceUsage, Snapshot
from mooring.scheduler.schedule import schedule
from tests.scheduler.backfill.test_planner import at, placed, running
from tests.scheduler.busy import NOW, snapshots
from tests.scheduler.clusters import H100, gpus, node, request

FULL = running(node("n1", gpus(H100, 4)), 0, 1, 2, 3, ends_in=None, project_id="busy")
WEEK = 7 * 86_400.0


def waiting(instance_id: str, project: str = "p", ago: float = 100, **changes: Any) -> Request:
    asked = request(1, instance_id=instance_id, queued_at=NOW - ago, project_id=project)
    return replace(asked, **changes)


def order(snapshot: Snapshot) -> list[str]:
    queue = list(line(snapshot).instance_ids)
    assert queue == list(schedule(snapshot).order)  # nothing fits: the plan has the same order
    return queue


def test_priority_comes_first_and_age_last() -> None:
    asked = (
        waiting("young", ago=1),
        waiting("old"),
        waiting("urgent", ago=1, priority=51),
        waiting("late", priority=49),
    )
    snapshot = at([FULL], *asked)
    assert order(snapshot) == ["urgent", "old", "young", "late"]
    ahead = line(snapshot).ahead("late")
    assert [(each.instance_id, each.because) for each in ahead] == [
        ("urgent", "priority"),
        ("old", "priority"),
        ("young", "priority"),
    ]
    assert [each.because for each in line(snapshot).ahead("young")] == ["priority", "age"]
    assert line(snapshot).position("young") == 3


def test_an_overdue_request_precedes_fair_share() -> None:
    asked = (
        waiting("overdue", "busy", ago=90_000),
        waiting("fair", "idle"),
        waiting("urgent", "busy", priority=51),
    )
    snapshot = at([FULL], *asked)
    assert order(snapshot) == ["urgent", "overdue", "fair"]
    assert [each.because for each in line(snapshot).ahead("fair")] == ["priority", "overdue"]
    patient = at([FULL], *asked, policy=Policy(overdue_after_s=100_000))
    assert order(patient) == ["urgent", "fair", "overdue"]


def test_the_project_with_fewer_gpus_comes_first() -> None:
    snapshot = at([FULL], waiting("more", "busy", ago=500), waiting("less", "idle"))
    assert order(snapshot) == ["less", "more"]
    assert [each.because for each in line(snapshot).ahead("more")] == ["fair_share"]


def test_a_backfill_slot_keeps_its_turn_when_fair_shares_change() -> None:
    full = running(node("n1", gpus(H100, 4)), 0, 1, 2, 3, ends_in=600, project_id="busy")
    asked = waiting("first", "p", ago=500), waiting("second", "q")
    before = at([full], *asked)
    plan = schedule(before)
    assert (plan.order, plan.with_slots) == (("first", "second"), ("first",))
    p_used_some = replace(before, projects={"p": ProjectView(used=ResourceUsage(gpu_s=WEEK))})
    assert order(p_used_some) == ["second", "first"]
    with_slot = replace(p_used_some, with_slots=frozenset(plan.with_slots))
    assert order(with_slot) == ["first", "second"]
    assert [each.because for each in line(with_slot).ahead("second")] == ["promised"]
    owns = {"p": ProjectView(used=ResourceUsage(gpu_s=WEEK)), "q": ProjectView(guaranteed_gpu_milli=1000)}
    assert order(replace(with_slot, projects=owns)) == ["second", "first"]


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
def test_of_two_projects(projects: dict[str, ProjectView], first: str) -> None:
    snapshot = replace(at([FULL], waiting("a", "a"), waiting("b", "b")), projects=projects)
    assert order(snapshot)[0] == first


def test_a_gpu_guarantee_does_not_help_cpu_requests() -> None:
    asked = (waiting("gpus", "a"), waiting("cpus", "b", gpu_count=0, cpu_milli=10**6))
    owned = {"b": ProjectView(guaranteed_gpu_milli=1000, used=ResourceUsage(gpu_s=9e6))}
    assert order(replace(at([FULL], *asked), projects=owned)) == ["gpus", "cpus"]


def test_fair_shares_are_updated_while_placing() -> None:
    """The first of `a` is the oldest; then `b` has its turn until both have the same."""
    asked = [waiting(f"a{number}", "a", ago=200 - number) for number in range(4)]
    asked += [waiting(f"b{number}", "b", ago=100 - number) for number in range(4)]
    plan = schedule(at([node("n1", gpus(H100, 4))], *asked))
    assert [each.instance_id for each in plan.placements] == ["a0", "b0", "a1", "b1"]


def test_a_placement_counts_against_all_requests_of_its_project() -> None:
    asked = (
        waiting("gpu", "a", ago=300),
        waiting("cpu", "a", ago=200, gpu_count=0),
        waiting("other", "b"),
    )
    plan = schedule(at([node("n1", gpus(H100, 4))], *asked))
    assert [each.instance_id for each in plan.placements] == ["gpu", "other", "cpu"]


def test_a_project_with_a_higher_weight_gets_more() -> None:
    asked = [waiting(f"{project}{number}", project) for project in "ab" for number in range(6)]
    snapshot = replace(at([node("n1", gpus(H100, 6))], *asked), projects={"a": ProjectView(weight=2)})
    assert sum(name.startswith("a") for name in placed(schedule(snapshot))) == 4


def test_an_unknown_instance_has_no_position() -> None:
    with pytest.raises(ValueError, match="not in"):
        line(at([FULL], waiting("a"))).position("b")


@settings(deadline=None, max_examples=20)
@given(snapshots())
def test_every_request_is_in_the_queue_once(snapshot: Snapshot) -> None:
    cache = CycleCache()
    schedule(snapshot, cache)
    queue = line(snapshot, cache)
    assert sorted(queue.instance_ids) == sorted(each.instance_id for each in snapshot.requests)
    assert list(queue.ranks) == sorted(queue.ranks)
    assert queue == line(snapshot)
