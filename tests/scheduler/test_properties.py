"""What holds of every plan, whatever the world."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from mooring.core.node import NodeState
from mooring.scheduler.filters import fits, needs
from mooring.scheduler.model import NodeView, Placement, Request, Snapshot
from mooring.scheduler.reasons import empty, would_fit
from mooring.scheduler.schedule import place_one, schedule
from tests.scheduler.worlds import nodes, requests

T = TypeVar("T")

SNAPSHOTS = st.builds(Snapshot, nodes(), requests())


def _after(snapshot: Snapshot, placements: tuple[Placement, ...]) -> dict[str, NodeView]:
    """The world with these placements in it; built without the scheduler's own subtraction."""
    world = {node.id: node for node in snapshot.nodes}
    for placed in placements:
        node = world[placed.node_id]
        world[node.id] = replace(
            node,
            cpu_milli_free=node.cpu_milli_free - placed.cpu_milli,
            memory_mib_free=node.memory_mib_free - placed.memory_mib,
            gpus=tuple(replace(gpu, free=gpu.free and gpu.uuid not in placed.gpu_uuids) for gpu in node.gpus),
        )
    return world


def _by_age(snapshot: Snapshot) -> list[Request]:
    return sorted(snapshot.requests, key=lambda request: (request.queued_at, request.instance_id))


@given(SNAPSHOTS)
def test_never_over_capacity(snapshot: Snapshot) -> None:
    for node in _after(snapshot, schedule(snapshot).placements).values():
        assert node.cpu_milli_free >= 0
        assert node.memory_mib_free >= 0


@given(SNAPSHOTS)
def test_no_gpu_twice_and_only_usable_ones(snapshot: Snapshot) -> None:
    given_out = Counter(uuid for placed in schedule(snapshot).placements for uuid in placed.gpu_uuids)
    usable = {gpu.uuid for node in snapshot.nodes for gpu in node.gpus if gpu.free and gpu.healthy}
    assert set(given_out.values()) <= {1}
    assert set(given_out) <= usable


@given(SNAPSHOTS)
def test_each_gets_what_it_asked_for(snapshot: Snapshot) -> None:
    asked = {request.instance_id: request for request in snapshot.requests}
    world = {node.id: node for node in snapshot.nodes}
    for placed in schedule(snapshot).placements:
        request, node = asked[placed.instance_id], world[placed.node_id]
        cards = [gpu for gpu in node.gpus if gpu.uuid in placed.gpu_uuids]
        assert len(cards) == len(placed.gpu_uuids) == request.gpu_count
        assert len({gpu.model for gpu in cards}) <= 1
        assert all((request.gpu_model or "").lower() in gpu.model.lower() for gpu in cards)
        assert all(gpu.memory_mib >= (request.gpu_min_memory_mib or 0) for gpu in cards)
        assert node.state is NodeState.READY
        assert request.node_selector.items() <= node.labels.items()
        assert (placed.cpu_milli, placed.memory_mib) == needs(request, node)


@given(SNAPSHOTS)
def test_each_request_is_answered_once(snapshot: Snapshot) -> None:
    plan = schedule(snapshot)
    answered = [placed.instance_id for placed in plan.placements]
    answered += [waiting.instance_id for waiting in plan.unplaced]
    assert sorted(answered) == sorted(request.instance_id for request in snapshot.requests)


@given(SNAPSHOTS)
def test_what_is_unplaced_fits_nowhere_and_every_node_says_why(snapshot: Snapshot) -> None:
    plan = schedule(snapshot)
    world = _after(snapshot, plan.placements)
    asked = {request.instance_id: request for request in snapshot.requests}
    for waiting in plan.unplaced:
        request = asked[waiting.instance_id]
        assert not any(fits(node, request) for node in world.values())
        assert {refusal.node_id for refusal in waiting.refusals} == set(world)
        assert waiting.ever == any(fits(empty(node), request) for node in world.values())
        assert waiting.summary


@given(SNAPSHOTS)
def test_one_run_decides_as_one_by_one_would(snapshot: Snapshot) -> None:
    """No memory of a run, of candidates or of failures, shows in its plan."""
    placements: list[Placement] = []
    for request in _by_age(snapshot):
        world = _after(snapshot, tuple(placements)).values()
        if placed := place_one(world, request):
            placements.append(placed)
    assert schedule(snapshot).placements == tuple(placements)


@given(SNAPSHOTS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(snapshot: Snapshot, random: Random) -> None:
    assert schedule(_shuffled(snapshot, random)) == schedule(snapshot)


def _shuffled(snapshot: Snapshot, random: Random) -> Snapshot:
    shuffled = [replace(node, gpus=tuple(_shuffle(node.gpus, random))) for node in snapshot.nodes]
    return Snapshot(tuple(_shuffle(shuffled, random)), tuple(_shuffle(snapshot.requests, random)))


def _shuffle(items: Sequence[T], random: Random) -> list[T]:
    return random.sample(items, len(items))


@given(nodes(at_most=4), requests(at_most=1))
def test_one_more_node_keeps_no_request_out(world: tuple[NodeView, ...], asked: tuple[Request, ...]) -> None:
    """Of one request. A whole queue may lose one: an older, larger request may fit now, and goes first."""
    if place_one(world[:-1], asked[0]):
        assert place_one(world, asked[0])


@given(nodes(), requests(at_most=1))
def test_what_would_fit_does(world: tuple[NodeView, ...], asked: tuple[Request, ...]) -> None:
    request = asked[0]
    alternatives = would_fit(world, request)
    if alternatives.max_count_now:
        assert place_one(world, replace(request, gpu_count=alternatives.max_count_now))
    if request.gpu_count:
        assert not place_one(world, replace(request, gpu_count=alternatives.max_count_now + 1))
        fitting_now = place_one(world, request) is not None
        assert fitting_now == (alternatives.max_count_now >= request.gpu_count)
    for model in alternatives.models_now:
        assert place_one(world, replace(request, gpu_model=model))


@given(SNAPSHOTS)
def test_a_second_run_finds_nothing_more(snapshot: Snapshot) -> None:
    plan = schedule(snapshot)
    waiting = {each.instance_id for each in plan.unplaced}
    left = tuple(request for request in snapshot.requests if request.instance_id in waiting)
    again = schedule(Snapshot(tuple(_after(snapshot, plan.placements).values()), left))
    assert not again.placements
    assert again.unplaced == plan.unplaced
