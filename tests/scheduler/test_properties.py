"""Properties of plans for slightly different clusters, and of explanations."""

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
from mooring.scheduler.model import NodeView, Request, SchedulingPlan, Snapshot
from mooring.scheduler.schedule import schedule
from tests.scheduler.busy import NOW, after, busy_node, request, snapshots
from tests.scheduler.clusters import place_one

T = TypeVar("T")

SNAPSHOTS = snapshots()
# Other work on the machine makes single examples slow.
property_of = settings(deadline=None, max_examples=30)


@property_of
@given(busy_node("n1"), request("i1"))
def test_a_node_fits_or_has_refusals(node: NodeView, asked: Request) -> None:
    at = Snapshot((), (), now=NOW).at
    found_refusals = list(refusals(node, asked, at))
    assert fits(node, asked, at) == (not found_refusals)
    assert (place_one([node], asked, at) is None) == bool(found_refusals)
    if found_refusals:
        assert unplaced([node], asked, at).refusals == tuple(found_refusals)


@property_of
@given(snapshots(requests_at_most=1))
def test_the_fleet_search_agrees_with_the_rules_of_the_nodes(snapshot: Snapshot) -> None:
    asked = snapshot.requests[0]
    found = place_one(snapshot.nodes, asked, snapshot.at)
    there = [node for node in snapshot.nodes if fits(node, asked, snapshot.at)]
    assert (found is not None) == bool(there)
    if found and len(asked.gpu_models) > 1:
        preferred = any(
            fits(node, replace(asked, gpu_models=asked.gpu_models[:1]), snapshot.at) for node in there
        )
        model = _model_of(snapshot, found.gpu_uuids[0])
        reserved = any(gpu.reserved for node in snapshot.nodes for gpu in node.gpus)
        assert preference(asked, model) == (0 if preferred else 1) or reserved


def _model_of(snapshot: Snapshot, uuid: str) -> str:
    return next(gpu.model for node in snapshot.nodes for gpu in node.gpus if gpu.uuid == uuid)


@property_of
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
        for each in _life(snapshot, random):
            assert schedule(each, cache) == schedule(each)


def _life(snapshot: Snapshot, random: Random) -> list[Snapshot]:
    """The snapshot, then the same later, with all or part of the plan carried out."""
    plan = schedule(snapshot)
    some = tuple(placed for placed in plan.placements if random.random() < 0.7)
    waiting = {each.instance_id for each in plan.unplaced}
    left = tuple(each for each in snapshot.requests if each.instance_id in waiting)
    carried_out = after(snapshot, replace(plan, placements=some)).nodes
    nodes = tuple(carried_out[node.id] for node in snapshot.nodes)
    later = replace(
        snapshot, nodes=nodes, requests=left, now=snapshot.now + random.choice([0, 1, 65, 400, 900])
    )
    return [snapshot, snapshot, later, replace(later, nodes=nodes[1:])]


@property_of
@given(snapshots(requests_at_most=1), busy_node("n9"))
def test_one_more_node_keeps_no_request_out(snapshot: Snapshot, another: NodeView) -> None:
    """For one request. In a queue, a request may lose its place to one ahead of it that now fits."""
    asked = snapshot.requests[0]
    if place_one(snapshot.nodes, asked, snapshot.at):
        assert place_one((*snapshot.nodes, another), asked, snapshot.at)


@property_of
@given(snapshots(requests_at_most=1))
def test_suggested_alternatives_fit(snapshot: Snapshot) -> None:
    asked, nodes, at = snapshot.requests[0], snapshot.nodes, snapshot.at
    instead = would_fit(nodes, asked, at)
    fits_now = place_one(nodes, asked, at) is not None
    if instead.max_count_now:
        assert place_one(nodes, replace(asked, gpu_count=instead.max_count_now), at)
    if asked.gpu_count:
        assert fits_now == (instead.max_count_now >= asked.gpu_count)
    for model in instead.models_now:
        assert place_one(nodes, replace(asked, gpu_models=(model,)), at)
    if instead.share_milli_now:
        assert place_one(nodes, replace(asked, gpu_milli=instead.share_milli_now), at)
    if instead.without_same_numa:
        assert not fits_now
        assert place_one(nodes, replace(asked, same_numa=False), at)


@property_of
@given(SNAPSHOTS)
def test_a_lower_priority_does_not_overtake_an_equal_request(snapshot: Snapshot) -> None:
    """Of equal requests of one project, the one with the higher priority is first."""
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


@property_of
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
