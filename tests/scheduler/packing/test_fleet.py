"""The fleet places requests where they fit and the waste is least."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooring.scheduler.packing import fleet as fleets_module
from mooring.scheduler.packing.fleet import Fleet
from mooring.scheduler.packing.potential import Potential
from mooring.scheduler.packing.shapes import FleetNode, Move, NodeClass, Shape, tie_of
from mooring_client.schemas.spec import WHOLE_MILLI
from tests.scheduler.fleets import BIG, MIXED, PLAIN, SMALL, fleets, node, potential, shapes, share, whole


def of(*nodes: FleetNode) -> Fleet:
    return Fleet(nodes, potential())


def fits(node: FleetNode, shape: Shape) -> bool:
    """Whether the request fits, without code of the scheduler."""
    cpu_milli, memory_mib = shape.takes(node.node_class)
    if node.cpu_milli_free < cpu_milli or node.memory_mib_free < memory_mib:
        return False
    if not shape.gpus:
        return True
    owners = node.owners or ("",) * len(node.node_class.models)
    enough: dict[str, int] = {}
    for model, free, owner in zip(node.node_class.models, node.gpu_milli_free, owners, strict=True):
        usable = not shape.share or owner in {"", shape.owner}
        if usable and free >= shape.gpu_milli and (not shape.models or model in shape.models):
            enough[model] = enough.get(model, 0) + 1
    return max(enough.values(), default=0) >= shape.gpus


class TestFits:
    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            (whole(2), True),
            (whole(3), False),
            (whole(1, cpu_milli=16_000), True),
            (whole(1, cpu_milli=16_001), False),
            (whole(1, memory_mib=100_001), False),
            (whole(1, models=frozenset({"A"})), False),
            (whole(1, models=frozenset({"A", "B"})), True),
            (share(999), True),
            (Shape(0, 0, 16_000, 100_000), True),
            (Shape(2, WHOLE_MILLI, None, None), True),
        ],
    )
    def test_an_empty_node(self, shape: Shape, expected: bool) -> None:
        assert (of(node("a")).best(shape) is not None) == expected

    def test_whole_gpus_have_one_model(self) -> None:
        mixed = of(node("a", MIXED))
        assert mixed.best(whole(3)) is None
        found = mixed.best(whole(2))
        assert found is not None
        assert found.gpus == (0, 2)

    def test_a_share_uses_one_gpu(self) -> None:
        assert of(node("a", gpu_milli_free=(400, 400))).best(share(500)) is None

    def test_owners_do_not_share_a_gpu(self) -> None:
        taken = node("a", gpu_milli_free=(500, 400), owners=("p", "q"))
        assert of(taken).best(share(300, owner="r")) is None
        found = of(taken).best(share(300, owner="q"))
        assert found is not None
        assert found.gpus == (1,)

    def test_null_cpus_and_memory_are_the_share_of_the_gpus(self) -> None:
        fleet = of(node("a"))
        shape = Shape(1, 500, None, None)
        move = fleet.best(shape)
        assert move is not None
        fleet.take(move, shape)
        assert fleet.node(0).cpu_milli_free == 12_000
        assert fleet.node(0).memory_mib_free == 75_000

    def test_an_empty_fleet(self) -> None:
        assert Fleet().best(whole()) is None
        assert Fleet().ranked(whole(), 3) == []


class TestChoice:
    def test_a_share_goes_to_a_shared_gpu_first(self) -> None:
        fleet = of(node("a"), node("b", gpu_milli_free=(1000, 530)), node("c"))
        move = fleet.best(share(470))
        assert move is not None
        assert (fleet.node(move.node).id, move.gpus) == ("b", (1,))

    def test_a_fixed_order_breaks_ties_between_nodes(self) -> None:
        names = [f"n{number}" for number in range(20)]
        fleet = of(*(node(name) for name in names))
        ranked = [fleet.node(move.node).id for move in fleet.ranked(whole(), 20)]
        assert ranked == sorted(names, key=tie_of, reverse=True)

    def test_the_order_of_the_nodes_does_not_matter(self) -> None:
        nodes = [node("a"), node("b", BIG), node("c", MIXED)]
        forwards, backwards = of(*nodes), of(*reversed(nodes))
        for shape in (whole(), whole(2), share(470), share(160)):
            a, b = forwards.best(shape), backwards.best(shape)
            assert a is not None
            assert b is not None
            assert (forwards.node(a.node).id, a.gpus) == (backwards.node(b.node).id, b.gpus)
            forwards.take(a, shape)
            backwards.take(b, shape)

    def test_candidate_nodes(self) -> None:
        fleet = of(node("a"), node("b"), node("c"))
        assert [move.node for move in fleet.ranked(whole(), 9, among=[1])] == [1]
        assert fleet.best(whole(), among=np.array([False, False, True])) == Move(
            2, (0,), fleet.ranked(whole(), 9)[0].score
        )
        assert fleet.best(whole(), among=[]) is None

    def test_blocked_gpus_are_not_used(self) -> None:
        fleet = of(node("a"))
        assert fleet.best(whole(2), blocked={0: (0,)}) is None
        found = fleet.best(whole(1), blocked={0: (0,)})
        assert found is not None
        assert found.gpus == (1,)
        assert fleet.best(whole(2)) is not None

    def test_a_removed_node_is_not_chosen_and_the_others_keep_their_index(self) -> None:
        fleet = of(node("a"), node("b"))
        fleet.best(whole())
        fleet.remove(["a"])
        assert [move.node for move in fleet.ranked(whole(), 9)] == [1]
        fleet.refresh([node("a")])
        assert {move.node for move in fleet.ranked(whole(), 9)} == {1, 2}
        assert fleet.index("a") == 2


class TestTake:
    def test_a_failed_take_changes_nothing(self) -> None:
        fleet = of(node("a"))
        before = fleet.node(0)
        for shape in (whole(1, cpu_milli=99_000), whole(1, memory_mib=999_000)):
            with pytest.raises(ValueError, match="does not have that much free"):
                fleet.take(Move(0, (0,), 0), shape)
        fleet.take(Move(0, (0,), 0), share(600, 0, 0))
        with pytest.raises(ValueError, match="does not have that much free"):
            fleet.take(Move(0, (0,), 0), share(600, 0, 0))
        fleet.give_back(Move(0, (0,), 0), share(600, 0, 0))
        assert fleet.node(0).gpu_milli_free == before.gpu_milli_free

    def test_take_rejects_a_gpu_of_another_owner(self) -> None:
        fleet = of(node("a"))
        fleet.take(Move(0, (0,), 0), share(300, owner="p"))
        with pytest.raises(ValueError, match="another owner"):
            fleet.take(Move(0, (0,), 0), share(300, owner="q"))
        fleet.give_back(Move(0, (0,), 0), share(300, owner="p"))
        fleet.take(Move(0, (0,), 0), share(300, owner="q"))
        assert fleet.node(0).owners == ("q", "")

    def test_give_back_rejects_more_than_was_taken(self) -> None:
        with pytest.raises(ValueError, match="more is released"):
            of(node("a")).give_back(Move(0, (0,), 0), share(300))


steps = st.lists(st.tuples(st.booleans(), shapes), min_size=1, max_size=25)


@settings(deadline=None, max_examples=40)
@given(fleets, steps)
def test_all_that_fits_is_placed_and_nothing_is_overcommitted(
    nodes: list[FleetNode], steps: list[tuple[bool, Shape]]
) -> None:
    fleet = of(*nodes)
    running: list[tuple[Move, Shape]] = []
    for one_ends, shape in steps:
        if one_ends and running:
            fleet.give_back(*running.pop(0))
        current = [fleet.node(index) for index in range(len(nodes))]
        move = fleet.best(shape)
        fitting = {index for index, each in enumerate(current) if fits(each, shape)}
        assert {each.node for each in fleet.ranked(shape, len(current))} == fitting
        if move is None:
            continue
        assert len(set(move.gpus)) == shape.gpus
        fleet.take(move, shape)
        running.append((move, shape))
        state = fleet.node(move.node)
        assert (
            min(state.cpu_milli_free, state.memory_mib_free, *state.gpu_milli_free, 0) == 0
        )  # none is negative
    for move, shape in running:
        fleet.give_back(move, shape)
    assert [fleet.node(index).gpu_milli_free for index in range(len(nodes))] == [
        each.gpu_milli_free for each in nodes
    ]


@settings(deadline=None, max_examples=40)
@given(fleets, steps, shapes)
def test_cached_scores_equal_new_ones(
    nodes: list[FleetNode], steps: list[tuple[bool, Shape]], last: Shape
) -> None:
    fleet = of(*nodes)
    running: list[tuple[Move, Shape]] = []
    for one_ends, shape in steps:
        if one_ends and running:
            fleet.give_back(*running.pop(0))
        if move := fleet.best(shape):
            fleet.take(move, shape)
            running.append((move, shape))
    fresh = of(*(fleet.node(index) for index in range(len(nodes))))
    for shape in {last, *(shape for _one_ends, shape in steps)}:
        assert fleet.ranked(shape, 9) == fresh.ranked(shape, 9)


@settings(deadline=None, max_examples=40)
@given(fleets, shapes, st.sampled_from((BIG, SMALL, MIXED, PLAIN)))
def test_an_added_node_keeps_no_request_out(
    nodes: list[FleetNode], shape: Shape, node_class: NodeClass
) -> None:
    fleet = of(*nodes)
    before = fleet.best(shape)
    fleet.refresh([node("another", node_class)])
    assert before is None or fleet.best(shape) is not None


def test_small_caches_and_clearing_them_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets_module, "MAX_SHAPES", 4)
    monkeypatch.setattr(fleets_module, "MAX_STATES", 16)
    bounded, unbounded = of(node("a", BIG), node("b", MIXED)), of(node("a", BIG), node("b", MIXED))
    for milli in range(50, 400, 10):
        shape = share(milli)
        monkeypatch.setattr(fleets_module, "MAX_STATES", 16)
        move = bounded.best(shape)
        monkeypatch.setattr(fleets_module, "MAX_STATES", 10**6)
        assert move == unbounded.best(shape)
        if move:
            bounded.take(move, shape)
            unbounded.take(move, shape)


def test_fleets_with_different_class_numbers_share_a_potential() -> None:
    one = potential()
    nodes = [node("a", BIG), node("b", SMALL), node("c", MIXED, gpu_milli_free=(1000, 400, 0))]
    requested = [whole(), share(470), share(160), Shape(1, WHOLE_MILLI, None, None), Shape(0, 0, 500, 0)]
    forwards, backwards = Fleet(nodes, one), Fleet(reversed(nodes), one)
    for shape in requested:
        ranked = [
            [(fleet.node(move.node).id, move.score) for move in fleet.ranked(shape, 9)]
            for fleet in (forwards, backwards)
        ]
        assert ranked[0] == ranked[1]


def test_a_new_potential_applies_at_once() -> None:
    fleet = Fleet([node("a"), node("b", gpu_milli_free=(1000, 530))], Potential())
    first = max(("a", "b"), key=tie_of)
    found = fleet.best(share(470))
    assert found is not None
    assert fleet.node(found.node).id == first
    fleet.reprice(potential())
    found = fleet.best(share(470))
    assert found is not None
    assert fleet.node(found.node).id == "b"
