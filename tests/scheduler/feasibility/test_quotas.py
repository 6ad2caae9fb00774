"""Plans and explanations for projects with quotas."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import explain, unplaced, would_fit
from mooring.scheduler.feasibility import quotas
from mooring.scheduler.feasibility.filters import fits
from mooring.scheduler.model import NodeView, Over, Placement, Quota, Request, Snapshot
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.schedule import SchedulingCycle, schedule
from tests.scheduler.busy import after
from tests.scheduler.clusters import A10, AT, H100, gpus, h100s, node, nodes, place_one, request, requests
from tests.scheduler.test_properties import _shuffled

SPENT = Over("gpu_hours_per_day", 1, 2, None, "2026-11-22T00:00:00.000Z")
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.integers(1, 8).map(lambda gpus: gpus * 1000),
        "gpus_by_model.H100": st.integers(0, 4).map(lambda gpus: gpus * 1000),
        "gpus_by_model.NVIDIA A10": st.integers(0, 4).map(lambda gpus: gpus * 1000),
        "instances": st.integers(2, 12),
        "cpus": st.integers(2_000, 40_000),
        "memory_mib": st.integers(4_096, 65_536),
    },
)


@st.composite
def _snapshots(draw: st.DrawFn) -> Snapshot:
    """Two projects with quotas and one without; pending requests are counted as in the control plane."""
    # Several copies of each, because equal requests share keys and caches.
    pending = tuple(
        replace(each, instance_id=f"{each.instance_id}-{copy}", project_id=project)
        for each in draw(requests(at_most=5))
        for project in [draw(st.sampled_from("aabc"))]
        for copy in range(draw(st.integers(1, 4)))
    )
    limited = {}
    for project in "ab":
        limits = draw(LIMITS)
        placed = {name: draw(st.integers(0, limit // 2000)) * 1000 for name, limit in limits.items()}
        waiting: Counter[str] = Counter()
        for each in pending:
            if each.project_id == project:
                waiting.update(quotas.fixed_amounts(limits, each))
        spent = draw(st.sampled_from([None] * 5 + [SPENT]))
        limited[project] = Quota(limits, placed, waiting, spent)
    # A node with free H100 and A10, so that the quotas decide often, and not the nodes.
    free = node("n9", gpus([H100] * 4 + [A10] * 4, on="n9"), cpus=32, memory_mib=65_536)
    return Snapshot((*draw(nodes(at_most=3)), *([free] if draw(st.booleans()) else ())), pending, limited)


SNAPSHOTS = _snapshots()


def _used(snapshot: Snapshot, placements: tuple[Placement, ...]) -> dict[str, Counter[str]]:
    """What each project uses after the plan, counted without code of the scheduler."""
    pending = {each.instance_id: each for each in snapshot.requests}
    models = {gpu.uuid: gpu.model for node in snapshot.nodes for gpu in node.gpus}
    used = {project: Counter(quota.placed) for project, quota in snapshot.quotas.items()}
    for placed in placements:
        amounts = used.setdefault(pending[placed.instance_id].project_id, Counter())
        amounts["gpus"] += 1000 * len(placed.gpu_uuids)
        amounts["instances"] += 1
        amounts["cpus"] += placed.cpu_milli
        amounts["memory_mib"] += placed.memory_mib
        amounts["gpus_by_model.H100"] += 1000 * sum(models[uuid] == H100 for uuid in placed.gpu_uuids)
        amounts["gpus_by_model.NVIDIA A10"] += 1000 * sum(models[uuid] == A10 for uuid in placed.gpu_uuids)
    return used


def _quotas_after(snapshot: Snapshot, plan: SchedulingPlan) -> dict[str, Quota]:
    """The quotas, counted again after the plan."""
    left = {each.instance_id for each in plan.unplaced}
    return _counted(
        snapshot, plan.placements, [each for each in snapshot.requests if each.instance_id in left]
    )


def _after(snapshot: Snapshot, placements: tuple[Placement, ...]) -> dict[str, NodeView]:
    return after(snapshot, SchedulingPlan(placements, ())).nodes


@settings(deadline=None, max_examples=60)
@given(SNAPSHOTS)
def test_invariants_of_every_plan_under_quotas(snapshot: Snapshot) -> None:
    plan = schedule(snapshot)
    for check in (
        no_plan_exceeds_a_quota,
        used_and_requested_amounts_stay_within_a_quota,
        no_gpus_once_the_gpu_hours_are_spent,
        unplaced_requests_fit_nowhere_and_a_decisive_quota_is_named,
    ):
        check(snapshot, plan)


def no_plan_exceeds_a_quota(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    event(f"placed: {bool(plan.placements)}, over: {any(each.over for each in plan.unplaced)}")
    used = _used(snapshot, plan.placements)
    for project, quota in snapshot.quotas.items():
        for name, limit in quota.limits.items():
            assert used[project][name] <= limit


def used_and_requested_amounts_stay_within_a_quota(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    after = _quotas_after(snapshot, plan)
    for project, before in snapshot.quotas.items():
        for name, limit in before.limits.items():
            if before.placed.get(name, 0) + before.waiting.get(name, 0) <= limit:
                assert after[project].placed[name] + after[project].waiting[name] <= limit


def no_gpus_once_the_gpu_hours_are_spent(snapshot: Snapshot, plan: SchedulingPlan) -> None:
    spent = {project for project, quota in snapshot.quotas.items() if quota.spent}
    pending = {each.instance_id: each for each in snapshot.requests}
    assert not any(
        placed.gpu_uuids and pending[placed.instance_id].project_id in spent for placed in plan.placements
    )
    for waiting in plan.unplaced:
        request = pending[waiting.instance_id]
        if request.project_id in spent and request.gpu_count:
            assert waiting.over == SPENT


@settings(deadline=None, max_examples=30)
@given(SNAPSHOTS)
def test_a_cycle_decides_like_single_placements(snapshot: Snapshot) -> None:
    placements: list[Placement] = []
    cycle = SchedulingCycle(snapshot, CycleCache())
    plan = cycle.plan()
    in_order = [replace(unit.first, quota=None) for unit in cycle.decided]
    waiting_requests = list(in_order)
    for pending in in_order:
        left = SchedulingPlan(tuple(placements), ())
        cluster = _after(snapshot, left.placements).values()
        counted = _counted(snapshot, left.placements, waiting_requests)
        if placed := place_one(cluster, replace(pending, quota=counted.get(pending.project_id)), AT):
            placements.append(placed)
            waiting_requests.remove(pending)
    assert plan.placements == tuple(placements)


def _counted(
    snapshot: Snapshot, placements: tuple[Placement, ...], waiting_requests: list[Request]
) -> dict[str, Quota]:
    """The quotas with these placements and waiting requests."""
    used = _used(snapshot, placements)
    counted = {}
    for project, quota in snapshot.quotas.items():
        waiting: Counter[str] = Counter()
        for each in waiting_requests:
            if each.project_id == project:
                waiting.update(quotas.fixed_amounts(quota.limits, each))
        counted[project] = replace(quota, placed=used[project], waiting=waiting)
    return counted


def unplaced_requests_fit_nowhere_and_a_decisive_quota_is_named(
    snapshot: Snapshot, plan: SchedulingPlan
) -> None:
    cluster = tuple(_after(snapshot, plan.placements).values())
    after = _quotas_after(snapshot, plan)
    pending = {each.instance_id: each for each in snapshot.requests}
    for waiting in plan.unplaced:
        unlimited = pending[waiting.instance_id]
        limited = replace(unlimited, quota=after.get(unlimited.project_id))
        assert not any(fits(node, limited, AT) for node in cluster)
        assert unplaced(cluster, limited, AT).refusals == explain(cluster, limited, AT)
        if any(fits(node, unlimited, AT) for node in cluster):
            assert waiting.over is not None
        if waiting.over is not None:
            assert limited.quota is not None
            assert waiting.over.quota in waiting.summary
        elif waiting.refusals:
            assert not any(fits(node, unlimited, AT) for node in cluster)


@settings(deadline=None, max_examples=30)
@given(SNAPSHOTS)
def test_a_second_cycle_places_nothing_more(snapshot: Snapshot) -> None:
    plan = schedule(snapshot)
    left = {each.instance_id for each in plan.unplaced}
    cluster = tuple(_after(snapshot, plan.placements).values())
    waiting_requests = tuple(each for each in snapshot.requests if each.instance_id in left)
    again = schedule(Snapshot(cluster, waiting_requests, _quotas_after(snapshot, plan)))
    assert not again.placements
    assert {each.instance_id: each for each in again.unplaced} == {
        each.instance_id: each for each in plan.unplaced
    }


@settings(deadline=None, max_examples=25)
@given(SNAPSHOTS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(snapshot: Snapshot, random: Random) -> None:
    shuffled = replace(_shuffled(snapshot, random), quotas=snapshot.quotas)
    assert schedule(shuffled) == schedule(snapshot)


@settings(deadline=None, max_examples=30)
@given(nodes(), requests(), st.sampled_from("ab"))
def test_a_large_quota_changes_nothing(
    cluster: tuple[NodeView, ...], pending: tuple[Request, ...], project: str
) -> None:
    of_project = tuple(replace(each, project_id=project) for each in pending)
    plenty = dict.fromkeys(("gpus", "gpus_by_model.H100", "instances", "cpus", "memory_mib"), 10**9)
    limited = schedule(Snapshot(cluster, of_project, {"a": Quota(plenty, {}, {})}))
    assert limited == schedule(Snapshot(cluster, of_project))


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        (request(2, "H100 80GB"), {"gpus": 2000, "gpus_by_model.H100": 2000, "cpus": 1000}),
        (request(2, "h100"), {"gpus": 2000, "gpus_by_model.H100": 2000, "cpus": 1000}),
        # A name with fewer or other words than the limit may match another model.
        (request(2, "80GB"), {"gpus": 2000, "cpus": 1000}),
        (request(2), {"gpus": 2000, "cpus": 1000}),
        (request(2, cpu_milli=None), {"gpus": 2000}),
        (
            request(2, gpu_models=("H100", "h100 80gb")),
            {"gpus": 2000, "gpus_by_model.H100": 2000, "cpus": 1000},
        ),
        (request(2, gpu_models=("H100", "A100")), {"gpus": 2000, "cpus": 1000}),
        (request(1, gpu_milli=250), {"gpus": 250, "cpus": 1000}),
        (request(0, cpu_milli=None), {"gpus": 0, "cpus": 1000}),
    ],
)
def test_amounts_that_are_the_same_on_every_node(pending: Request, expected: dict[str, int]) -> None:
    limits = {"gpus": 9, "gpus_by_model.H100": 9, "cpus": 9000}
    assert {name: amount for name, amount in quotas.fixed_amounts(limits, pending).items() if amount} == {
        name: amount for name, amount in expected.items() if amount
    }


MIXED = node(gpu_views=gpus([H100, H100, A10, A10, A10]))
NO_A10 = Quota({"gpus_by_model.A10": 0}, {}, {})
FULL = Quota({"gpus": 4000, "cpus": 8000}, {"gpus": 3000, "cpus": 7500}, {})

EXPLANATIONS = [
    ([MIXED], request(3), NO_A10, "gpus_by_model.A10 is 0: 0 used, 3 asked"),
    # The quota is not mentioned if the nodes are full, or could never host the request.
    ([h100s("n1", 8)], request(1), NO_A10, "no node has 1 free GPU (all are in use or quarantined)"),
    ([MIXED], request(6), NO_A10, "no node could ever host this: no node has 6 GPUs of one model"),
    ([h100s("n1", 8), MIXED], request(3), NO_A10, "gpus_by_model.A10 is 0"),
    # It is mentioned if it rules out every node.
    ([h100s("n1", 8)], request(2), FULL, "gpus is 4: 3 used, 2 asked"),
    ([], request(2), FULL, "it starts when something else of the project ends, or when an admin raises"),
    ([MIXED], request(0), FULL, "cpus is 8: 7.5 used, 1 asked"),
    (
        [MIXED],
        request(1),
        replace(FULL, spent=SPENT),
        "is 1: 2 used; it starts from 2026-11-22T00:00:00.000Z",
    ),
]


@pytest.mark.parametrize(("cluster", "pending", "quota", "expected"), EXPLANATIONS)
def test_explanations(cluster: list[NodeView], pending: Request, quota: Quota, expected: str) -> None:
    (waiting,) = schedule(
        Snapshot(tuple(cluster), (replace(pending, project_id="a"),), {"a": quota})
    ).unplaced
    assert expected in waiting.summary


def test_another_model_is_used_if_the_quota_excludes_the_best() -> None:
    pending = request(1, project_id="a")
    placed = schedule(Snapshot((MIXED,), (pending,), {"a": NO_A10})).placements
    assert placed[0].gpu_uuids[0] in {MIXED.gpus[0].uuid, MIXED.gpus[1].uuid}


def test_of_equal_requests_exactly_the_quota_is_placed() -> None:
    cluster = tuple(h100s(f"n{place}") for place in range(3))
    queue = tuple(replace(request(1), instance_id=f"i{place}", project_id="a") for place in range(5))
    plan = schedule(Snapshot(cluster, queue, {"a": Quota({"gpus": 2000}, {}, {"gpus": 5000})}))
    assert (len(plan.placements), len(plan.unplaced)) == (2, 3)


def test_a_node_offers_another_model_once_the_quota_of_the_first_is_used() -> None:
    small = node("n1", gpus([A10], on="n1"), cpus=2)
    mixed = node("n2", gpus([A10, H100, H100], on="n2"))
    queue = tuple(replace(request(1), instance_id=f"i{place}", project_id="a") for place in range(2))
    plan = schedule(Snapshot((small, mixed), queue, {"a": Quota({"gpus_by_model.A10": 1000}, {}, {})}))
    assert [placed.gpu_uuids for placed in plan.placements] == [("GPU-n1-0",), ("GPU-n2-1",)]


def test_suggested_alternatives_are_within_the_quota() -> None:
    quota = Quota({"gpus": 4000}, {"gpus": 1000}, {"gpus": 2000})
    pending = request(2, "H100", quota=quota)
    alternatives = would_fit([MIXED], replace(pending, quota=quotas.without(quota, pending)), AT)
    assert alternatives.max_count_now == 2
    others = Quota({"gpus": 4000}, {"gpus": 1000}, {"gpus": 4000})
    assert would_fit([MIXED], replace(pending, quota=quotas.without(others, pending)), AT).max_count_now == 1
