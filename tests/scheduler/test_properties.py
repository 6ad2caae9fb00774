"""Properties of placements, plans and explanations in random clusters."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import unplaced, would_fit
from mooring.scheduler.feasibility.filters import fits, refusals
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.model import NodeView, Request, Snapshot
from mooring.scheduler.plan import SchedulingPlan
from mooring.scheduler.schedule import schedule
from tests.scheduler.busy import NOW, after, busy_node, request, snapshots
from tests.scheduler.clusters import place_one

T = TypeVar("T")

SNAPSHOTS = snapshots()
# Other work on the machine makes single examples slow.
few_examples = settings(deadline=None, max_examples=30)


@few_examples
@given(busy_node("n1"), request("i1"))
def test_a_request_fits_a_node_or_has_refusals(node: NodeView, pending: Request) -> None:
    at = Snapshot((), (), now=NOW).at
    found_refusals = list(refusals(node, pending, at))
    assert fits(node, pending, at) == (not found_refusals)
    assert (place_one([node], pending, at) is None) == bool(found_refusals)
    if found_refusals:
        assert unplaced([node], pending, at).refusals == tuple(found_refusals)


@few_examples
@given(snapshots(requests_at_most=1))
def test_the_fleet_search_agrees_with_the_rules_of_the_nodes(snapshot: Snapshot) -> None:
    pending = snapshot.requests[0]
    found = place_one(snapshot.nodes, pending, snapshot.at)
    fitting = [node for node in snapshot.nodes if fits(node, pending, snapshot.at)]
    assert (found is not None) == bool(fitting)
    if found and len(pending.gpu_models) > 1:
        preferred = any(
            fits(node, replace(pending, gpu_models=pending.gpu_models[:1]), snapshot.at) for node in fitting
        )
        model = _model_of(snapshot, found.gpu_uuids[0])
        reserved = any(gpu.reserved for node in snapshot.nodes for gpu in node.gpus)
        assert preference(pending, model) == (0 if preferred else 1) or reserved


def _model_of(snapshot: Snapshot, uuid: str) -> str:
    return next(gpu.model for node in snapshot.nodes for gpu in node.gpus if gpu.uuid == uuid)


@few_examples
@given(SNAPSHOTS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(snapshot: Snapshot, random: Random) -> None:
    assert schedule(_shuffled(snapshot, random)) == schedule(snapshot)


def _shuffled(snapshot: Snapshot, random: Random) -> Snapshot:
    shuffled = [
        replace(
            node,
            gpus=tuple(_shuffle(node.gpus, random)),
            running=tuple(_shuffle(node.running, random)),
        )
        for node in snapshot.nodes
    ]
    return replace(
        snapshot,
        nodes=tuple(_shuffle(shuffled, random)),
        requests=tuple(_shuffle(snapshot.requests, random)),
    )


def _shuffle(items: Sequence[T], random: Random) -> list[T]:
    return random.sample(items, len(items))


@settings(deadline=None, max_examples=12)
@given(st.lists(SNAPSHOTS, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_a_warm_cache_changes_nothing(snapshots_: list[Snapshot], random: Random) -> None:
    cache = CycleCache()
    for snapshot in snapshots_:
        for each in _successive(snapshot, random):
            assert schedule(each, cache) == schedule(each)


def _successive(snapshot: Snapshot, random: Random) -> list[Snapshot]:
    """The snapshot twice, then later with part of the plan carried out, then also without its first node."""
    plan = schedule(snapshot)
    carried_out = tuple(placed for placed in plan.placements if random.random() < 0.7)
    waiting = {each.instance_id for each in plan.unplaced}
    left = tuple(each for each in snapshot.requests if each.instance_id in waiting)
    nodes_after = after(snapshot, replace(plan, placements=carried_out)).nodes
    nodes = tuple(nodes_after[node.id] for node in snapshot.nodes)
    later = replace(
        snapshot, nodes=nodes, requests=left, now=snapshot.now + random.choice([0, 1, 65, 400, 900])
    )
    return [snapshot, snapshot, later, replace(later, nodes=nodes[1:])]


@few_examples
@given(snapshots(requests_at_most=1), busy_node("n9"))
def test_one_more_node_keeps_no_request_out(snapshot: Snapshot, another: NodeView) -> None:
    """For one request. In a queue, one ahead that now fits may take the place of another."""
    pending = snapshot.requests[0]
    if place_one(snapshot.nodes, pending, snapshot.at):
        assert place_one((*snapshot.nodes, another), pending, snapshot.at)


@few_examples
@given(snapshots(requests_at_most=1))
def test_suggested_alternatives_fit(snapshot: Snapshot) -> None:
    pending, nodes, at = snapshot.requests[0], snapshot.nodes, snapshot.at
    alternatives = would_fit(nodes, pending, at)
    fits_now = place_one(nodes, pending, at) is not None
    if alternatives.max_count_now:
        assert place_one(nodes, replace(pending, gpu_count=alternatives.max_count_now), at)
    if pending.gpu_count:
        assert fits_now == (alternatives.max_count_now >= pending.gpu_count)
    for model in alternatives.models_now:
        assert place_one(nodes, replace(pending, gpu_models=(model,)), at)
    if alternatives.share_milli_now:
        assert place_one(nodes, replace(pending, gpu_milli=alternatives.share_milli_now), at)
    if alternatives.without_same_numa:
        assert not fits_now
        assert place_one(nodes, replace(pending, same_numa=False), at)


@few_examples
@given(SNAPSHOTS)
def test_an_equal_request_of_lower_priority_does_not_overtake(snapshot: Snapshot) -> None:
    """Each request gets a twin in its project that differs in the priority only."""
    twins = tuple(
        replace(each, instance_id=f"{each.instance_id}-low", priority=each.priority - 10)
        for each in snapshot.requests
        if each.gang is None
    )
    plan = schedule(replace(snapshot, requests=(*snapshot.requests, *twins)))
    waiting = {each.instance_id for each in plan.unplaced}
    for twin in twins:
        if twin.instance_id not in waiting:
            assert twin.instance_id.removesuffix("-low") not in waiting


@few_examples
@given(SNAPSHOTS)
def test_a_second_cycle_places_nothing_more(snapshot: Snapshot) -> None:
    """Except gangs, which may find another set of nodes once others are placed."""
    snapshot = replace(snapshot, requests=tuple(each for each in snapshot.requests if each.gang is None))
    plan = schedule(snapshot)
    again = schedule(_left(snapshot, plan))
    assert not again.placements
    assert {each.instance_id for each in again.unplaced} == {each.instance_id for each in plan.unplaced}


def _left(snapshot: Snapshot, plan: SchedulingPlan) -> Snapshot:
    waiting = {each.instance_id for each in plan.unplaced}
    nodes = after(snapshot, plan).nodes
    return replace(
        snapshot,
        nodes=tuple(nodes[node.id] for node in snapshot.nodes),
        requests=tuple(each for each in snapshot.requests if each.instance_id in waiting),
    )
