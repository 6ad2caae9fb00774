"""Nodes reserved for projects, and required labels of a project's nodes, in all parts of the scheduler."""

from dataclasses import replace
from typing import Any

import pytest

from mooring.scheduler import reservations
from mooring.scheduler.backfill.planner import BackfillPlanner, StartTimes
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import unplaced, would_fit
from mooring.scheduler.feasibility.filters import admits, fits, refusals
from mooring.scheduler.model import Gang, GpuAllocation, NodeView, Placement, Request, Running, Snapshot
from mooring.scheduler.packing.fragmentation import fragmentation
from mooring.scheduler.preemption import Preemption
from mooring.scheduler.queue import ProjectShares
from mooring.scheduler.reservations import ReservationSpec, choose, reservable_gpus
from mooring.scheduler.schedule import schedule
from mooring.scheduler.units import Unit
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.clusters import AT, H100, h100s, place_one, request

OWNER, OTHER = "prj_owner", "prj_other"
OWN = frozenset({OWNER})


def own(node_id: str = "n1", **changes: Any) -> NodeView:
    return replace(h100s(node_id, **changes), reserved_for=OWN)


def of(project: str, count: int = 1, **changes: Any) -> Request:
    return request(count, **{"project_id": project, "instance_id": f"i-{project}", **changes})


def placed(nodes: list[NodeView], *pending: Request, **more: Any) -> dict[str, str]:
    plan = schedule(Snapshot(tuple(nodes), pending, **more))
    return {placement.instance_id: placement.node_id for placement in plan.placements}


def running(project: str, node_id: str, **changes: Any) -> Running:
    allocations = tuple(GpuAllocation(f"GPU-{node_id}-{place}") for place in range(8))
    made = Running(
        f"r-{project}", project, allocations, 1000, 1024, 10, preemptible=True, since=-1e6, ends_at=None
    )
    return replace(made, **changes)


# --- reserved nodes


@pytest.mark.parametrize("count", [0, 1, 8])
def test_other_projects_cannot_use_a_reserved_node(count: int) -> None:
    assert place_one([own()], of(OTHER, count), AT) is None
    assert place_one([own()], of(OWNER, count), AT) is not None
    assert not fits(own(), of(OTHER, count), AT)
    assert placed([own("n1"), h100s("n2")], of(OTHER, count)) == {f"i-{OTHER}": "n2"}


def test_the_refusal_does_not_name_other_projects() -> None:
    (refusal,) = refusals(own(), of(OTHER), AT)
    assert (refusal.code, refusal.had) == ("node_reserved", "reserved for other projects")
    assert OWNER not in repr(refusal)
    assert not list(refusals(own(), of(OWNER), AT))


def test_the_explanation_for_another_project() -> None:
    found = unplaced([own()], of(OTHER), AT)
    assert (found.code, found.ever) == ("never_placeable", False)
    assert "reserved for other projects" in found.summary
    assert OWNER not in found.summary
    assert would_fit([own()], of(OTHER), AT).max_count_now == 0
    assert would_fit([own()], of(OWNER), AT).max_count_now == 8


def test_caches_notice_when_a_node_is_reserved_or_released() -> None:
    cache = CycleCache()
    for reserved_for, fits_now in ((None, True), (OWN, False), (None, True)):
        nodes = (replace(h100s("n1"), reserved_for=reserved_for),)
        plan = schedule(Snapshot(nodes, (of(OTHER),)), cache)
        assert bool(plan.placements) is fits_now


def test_reserved_nodes_are_closed_to_shares_and_gangs_too() -> None:
    assert place_one([own()], of(OTHER, gpu_milli=250), AT) is None
    gang = Gang("g", 2, "host")
    members = [of(OTHER, 4, instance_id=f"m{rank}", gang=gang) for rank in range(2)]
    assert placed([own("n1"), h100s("n2", in_use=4)], *members) == {}
    owners = [replace(member, project_id=OWNER) for member in members]
    assert set(placed([own("n1"), h100s("n2", in_use=4)], *owners)) == {"m0", "m1"}


def test_a_gang_that_only_fits_on_others_nodes_is_never_placeable() -> None:
    gang = Gang("g", 2, "host")
    members = tuple(of(OTHER, 8, instance_id=f"m{rank}", gang=gang) for rank in range(2))
    plan = schedule(Snapshot((own("n1"), h100s("n2")), members))
    assert {each.code for each in plan.unplaced} == {"never_placeable"}


def test_no_preemption_on_nodes_of_other_projects() -> None:
    full = replace(own("n1", in_use=8), running=(running(OWNER, "n1"),))
    plan = schedule(Snapshot((full,), (of(OTHER, 8, priority=90),)))
    assert plan.evictions == ()
    by_owner = schedule(Snapshot((full,), (of(OWNER, 8, priority=90),)))
    assert [each.instance_id for each in by_owner.evictions] == [f"r-{OWNER}"]


def test_no_forecast_on_nodes_of_other_projects() -> None:
    """Start-time bounds are cached by shape: those of one project must not serve another."""
    full = replace(own("n1", in_use=8), running=(running(OWNER, "n1", preemptible=False, ends_at=100.0),))
    for first, second in ((OWNER, OTHER), (OTHER, OWNER)):
        cache = CycleCache()
        starts = []
        for project in (first, second):
            plan = schedule(Snapshot((full,), (of(project, 8),)), cache)
            starts.append([each.starts_at for each in plan.forecasts])
        assert sorted(starts) == [[], [130.0]]
        assert starts[(first, second).index(OWNER)] == [130.0]


def test_start_time_bounds_differ_by_project() -> None:
    cache = CycleCache()
    cache.update((own("n1"), h100s("n2", state=NodeState.CORDONED)))
    starts = StartTimes(cache.cluster)
    other = starts.bounds(of(OTHER), AT).values
    owner = starts.bounds(of(OWNER), AT).values
    assert [bool(value == 0) for value in other] == [False, False]
    assert [bool(value == 0) for value in owner] == [True, False]


def test_a_gpu_reservation_uses_no_nodes_of_other_projects() -> None:
    for project, count in ((OTHER, None), (OWNER, 8)):
        spec = ReservationSpec(of(project, 8), 0.0, 100.0)
        chosen = choose(reservable_gpus([own()], spec), spec)
        assert (chosen and len(chosen)) == count
        assert (reservations.earliest([own()], spec) is None) is (count is None)


def test_public_figures_of_free_gpus_exclude_reserved_nodes() -> None:
    found = fragmentation([own()], AT)[H100]
    assert found.fits[1] == 0
    assert found.stranded_milli == {"reserved": 8000}


# --- the project's selector


def test_the_selector_of_the_project_is_merged_and_wins() -> None:
    pending = of(OWNER, node_selector={"zone": "a", "disk": "nvme"}, project_selector={"zone": "b"})
    assert pending.selector == {"zone": "b", "disk": "nvme"}
    assert admits(h100s("n1", labels={"zone": "b", "disk": "nvme"}), pending)
    assert not admits(h100s("n1", labels={"zone": "a", "disk": "nvme"}), pending)
    nodes = [h100s("n1"), h100s("n2", labels={"zone": "b", "disk": "nvme"})]
    assert placed(nodes, pending) == {pending.instance_id: "n2"}


def test_the_refusal_says_if_the_project_requires_the_label() -> None:
    pending = of(OWNER, node_selector={"disk": "nvme"}, project_selector={"zone": "b"})
    wanted = [each.wanted for each in refusals(h100s("n1"), pending, AT)]
    assert wanted == ["disk=nvme", "zone=b (required by the project)"]
    found = unplaced([h100s("n1")], pending, AT)
    assert "zone=b (required by the project)" in found.summary


def test_equal_requests_of_two_projects_are_distinct() -> None:
    plain, bound = of(OTHER), of(OWNER, project_selector={"zone": "b"})
    nodes = (h100s("n1"),)
    plan = schedule(Snapshot(nodes, (replace(bound, queued_at=-1.0), plain)))
    assert [each.instance_id for each in plan.placements] == [plain.instance_id]
    assert [each.instance_id for each in plan.unplaced] == [bound.instance_id]


def test_the_owner_is_placed_on_the_reserved_node() -> None:
    found = place_one([own()], of(OWNER, 2), AT)
    assert isinstance(found, Placement)
    assert found.node_id == "n1"


def test_nodes_of_other_projects_are_not_searched_for_victims() -> None:
    """The search could not succeed, and the number of searches per scheduling cycle is limited."""
    full = replace(own("n1", in_use=8), running=(running(OWNER, "n1"),))
    lower_bounds = []
    for project in (OTHER, OWNER):
        pending = of(project, 8, priority=90)
        cache = CycleCache()
        cache.update((full,))
        snapshot = Snapshot((full,), (pending,))
        shares = ProjectShares(snapshot, cache.cluster.held, cache.cluster.total)
        planner = BackfillPlanner(cache.cluster, AT)
        preemption = Preemption(cache.cluster, snapshot, shares, planner)
        lower_bounds.append(preemption._min_victims_on(Unit((pending,)), pending, full))
    assert lower_bounds == [0, 1]
