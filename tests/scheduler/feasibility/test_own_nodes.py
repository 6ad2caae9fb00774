"""Nodes reserved for projects, and labels that a project's nodes must have, all over the scheduler."""

from dataclasses import replace
from typing import Any

import pytest

from mooring.core.node import NodeState
from mooring.scheduler import reservations
from mooring.scheduler.backfill.planner import BackfillPlanner, StartTimes
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import unplaced, would_fit
from mooring.scheduler.feasibility.filters import admits, fits, refusals
from mooring.scheduler.model import Gang, GpuAllocation, NodeView, Placement, Request, Running, Snapshot
from mooring.scheduler.packing.fragmentation import fragmentation
from mooring.scheduler.preemption import Preemption
from mooring.scheduler.queue import Shares
from mooring.scheduler.reservations import Asked, choose, stock
from mooring.scheduler.schedule import schedule
from mooring.scheduler.units import units_of
from tests.scheduler.worlds import AT, H100, h100s, place_one, request

OWNER, STRANGER = "prj_owner", "prj_stranger"
OWN = frozenset({OWNER})


def own(node_id: str = "n1", **changes: Any) -> NodeView:
    return replace(h100s(node_id, **changes), reserved_for=OWN)


def of(project: str, count: int = 1, **changes: Any) -> Request:
    return request(count, **{"project_id": project, "instance_id": f"i-{project}", **changes})


def placed(nodes: list[NodeView], *asked: Request, **more: Any) -> dict[str, str]:
    plan = schedule(Snapshot(tuple(nodes), asked, **more))
    return {placement.instance_id: placement.node_id for placement in plan.placements}


def running(project: str, node_id: str, **changes: Any) -> Running:
    grants = tuple(GpuAllocation(f"GPU-{node_id}-{place}") for place in range(8))
    made = Running(
        f"r-{project}", project, grants, 1000, 1024, 10, preemptible=True, since=-1e6, ends_at=None
    )
    return replace(made, **changes)


# --- reserved nodes


@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_stranger_is_kept_from_a_reserved_node_with_gpus_or_without(count: int) -> None:
    assert place_one([own()], of(STRANGER, count), AT) is None
    assert place_one([own()], of(OWNER, count), AT) is not None
    assert not fits(own(), of(STRANGER, count), AT)
    assert placed([own("n1"), h100s("n2")], of(STRANGER, count)) == {f"i-{STRANGER}": "n2"}


def test_the_refusal_names_no_other_project() -> None:
    (refusal,) = refusals(own(), of(STRANGER), AT)
    assert (refusal.code, refusal.had) == ("node_reserved", "reserved for other projects")
    assert OWNER not in repr(refusal)
    assert not list(refusals(own(), of(OWNER), AT))


def test_a_stranger_who_waits_is_told_why_and_for_ever() -> None:
    told = unplaced([own()], of(STRANGER), AT)
    assert (told.code, told.ever) == ("never_placeable", False)
    assert "reserved for other projects" in told.summary
    assert OWNER not in told.summary
    assert would_fit([own()], of(STRANGER), AT).max_count_now == 0
    assert would_fit([own()], of(OWNER), AT).max_count_now == 8


def test_a_reservation_that_is_made_or_ended_is_seen_by_what_is_remembered() -> None:
    memory = CycleCache()
    for reserved, there in ((None, True), (OWN, False), (None, True)):
        nodes = (replace(h100s("n1"), reserved_for=reserved),)
        plan = schedule(Snapshot(nodes, (of(STRANGER),)), memory)
        assert bool(plan.placements) is there


def test_shares_and_members_of_groups_are_kept_out_too() -> None:
    assert place_one([own()], of(STRANGER, gpu_milli=250), AT) is None
    gang = Gang("g", 2, "host")
    members = [of(STRANGER, 4, instance_id=f"m{rank}", gang=gang) for rank in range(2)]
    assert placed([own("n1"), h100s("n2", in_use=4)], *members) == {}
    owners = [replace(member, project_id=OWNER) for member in members]
    assert set(placed([own("n1"), h100s("n2", in_use=4)], *owners)) == {"m0", "m1"}


def test_a_group_that_only_strangers_nodes_could_hold_is_told_so() -> None:
    gang = Gang("g", 2, "host")
    members = tuple(of(STRANGER, 8, instance_id=f"m{rank}", gang=gang) for rank in range(2))
    plan = schedule(Snapshot((own("n1"), h100s("n2")), members))
    assert {each.code for each in plan.unplaced} == {"never_placeable"}


def test_nobody_is_evicted_from_a_node_that_the_one_who_waits_may_not_use() -> None:
    full = replace(own("n1", in_use=8), running=(running(OWNER, "n1"),))
    plan = schedule(Snapshot((full,), (of(STRANGER, 8, priority=90),)))
    assert plan.evictions == ()
    mine = schedule(Snapshot((full,), (of(OWNER, 8, priority=90),)))
    assert [each.instance_id for each in mine.evictions] == [f"r-{OWNER}"]


def test_no_start_is_promised_on_a_node_that_is_reserved_for_others() -> None:
    """The bounds are remembered by shape: the owner's must not serve the stranger, nor vice versa."""
    full = replace(own("n1", in_use=8), running=(running(OWNER, "n1", preemptible=False, ends_at=100.0),))
    for first, second in ((OWNER, STRANGER), (STRANGER, OWNER)):
        memory = CycleCache()
        starts = []
        for project in (first, second):
            plan = schedule(Snapshot((full,), (of(project, 8),)), memory)
            starts.append([each.starts_at for each in plan.forecasts])
        assert sorted(starts) == [[], [130.0]]
        assert starts[(first, second).index(OWNER)] == [130.0]


def test_the_bounds_of_starts_by_themselves() -> None:
    memory = CycleCache()
    memory.update((own("n1"), h100s("n2", state=NodeState.CORDONED)))
    starts = StartTimes(memory.cluster)
    stranger = starts.bounds(of(STRANGER), AT).values
    owner = starts.bounds(of(OWNER), AT).values
    assert [bool(value == 0) for value in stranger] == [False, False]
    assert [bool(value == 0) for value in owner] == [True, False]


def test_a_reservation_of_gpus_takes_none_of_others_nodes() -> None:
    for project, found in ((STRANGER, None), (OWNER, 8)):
        asked = Asked(of(project, 8), 0.0, 100.0)
        chosen = choose(stock([own()], asked), asked)
        assert (chosen and len(chosen)) == found
        assert (reservations.earliest([own()], asked) is None) is (found is None)


def test_what_everybody_is_told_of_free_gpus_leaves_reserved_nodes_out() -> None:
    told = fragmentation([own()], AT)[H100]
    assert told.fits[1] == 0
    assert told.stranded_milli == {"reserved": 8000}


# --- the project's selector


def test_the_selector_of_the_project_is_merged_and_wins() -> None:
    asked = of(OWNER, node_selector={"zone": "a", "disk": "nvme"}, project_selector={"zone": "b"})
    assert asked.selector == {"zone": "b", "disk": "nvme"}
    assert admits(h100s("n1", labels={"zone": "b", "disk": "nvme"}), asked)
    assert not admits(h100s("n1", labels={"zone": "a", "disk": "nvme"}), asked)
    nodes = [h100s("n1"), h100s("n2", labels={"zone": "b", "disk": "nvme"})]
    assert placed(nodes, asked) == {asked.instance_id: "n2"}


def test_the_refusal_says_whose_label_it_is() -> None:
    asked = of(OWNER, node_selector={"disk": "nvme"}, project_selector={"zone": "b"})
    wanted = [each.wanted for each in refusals(h100s("n1"), asked, AT)]
    assert wanted == ["disk=nvme", "zone=b (required by the project)"]
    told = unplaced([h100s("n1")], asked, AT)
    assert "zone=b (required by the project)" in told.summary


def test_two_projects_with_the_same_request_are_told_apart() -> None:
    plain, bound = of(STRANGER), of(OWNER, project_selector={"zone": "b"})
    nodes = (h100s("n1"),)
    plan = schedule(Snapshot(nodes, (replace(bound, queued_at=-1.0), plain)))
    assert [each.instance_id for each in plan.placements] == [plain.instance_id]
    assert [each.instance_id for each in plan.unplaced] == [bound.instance_id]


def test_the_placement_is_an_ordinary_one() -> None:
    found = place_one([own()], of(OWNER, 2), AT)
    assert isinstance(found, Placement)
    assert found.node_id == "n1"


def test_no_node_of_others_is_searched_for_victims() -> None:
    """As it would be in vain, and every look has so many searches only."""
    full = replace(own("n1", in_use=8), running=(running(OWNER, "n1"),))
    searched = []
    for project in (STRANGER, OWNER):
        asked = of(project, 8, priority=90)
        memory = CycleCache()
        memory.update((full,))
        snapshot = Snapshot((full,), (asked,))
        shares = Shares(snapshot, memory.cluster.held, memory.cluster.total)
        kept = BackfillPlanner(memory.cluster, AT)
        preemption = Preemption(memory.cluster, AT, snapshot.policy, shares, kept)
        (unit,) = units_of((asked,))
        searched.append(preemption._fewest(unit, asked, full))
    assert searched == [0, 1]
