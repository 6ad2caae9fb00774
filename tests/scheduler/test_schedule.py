"""Who goes first, where to, and what a run leaves behind."""

from dataclasses import fields, replace
from typing import Any

import pytest

from mooring.core.node import NodeState
from mooring.scheduler.model import NodeView, Request, Snapshot
from mooring.scheduler.schedule import place_one, schedule
from mooring.scheduler.search import key, shape
from tests.scheduler.worlds import A10, AT, H100, T4, V100, gpus, h100s, node, pairs, request


def _went(nodes: list[NodeView], asked: Request) -> str | None:
    placed = place_one(nodes, asked, AT)
    return placed.node_id if placed else None


def _plan(nodes: list[NodeView], *asked: Request) -> dict[str, str]:
    plan = schedule(Snapshot(tuple(nodes), asked))
    return {placed.instance_id: placed.node_id for placed in plan.placements}


def _queue(*asked: Request) -> list[Request]:
    return [replace(each, instance_id=f"i{place}", queued_at=place) for place, each in enumerate(asked)]


def test_the_oldest_first_and_ids_break_ties() -> None:
    late, early, twin = (
        request(instance_id="a", queued_at=2.0),
        request(instance_id="z", queued_at=1.0),
        request(instance_id="y", queued_at=1.0),
    )
    assert list(_plan([node(cards=gpus(T4, 2))], late, early, twin)) == ["y", "z"]


def test_what_does_not_fit_blocks_nothing_behind_it() -> None:
    queue = _queue(request(4, "H100"), request(1, "H100"))
    assert _plan([node(cards=gpus(H100, 2))], *queue) == {"i1": "n1"}


def test_a_run_subtracts_what_it_gives() -> None:
    where = [node(cards=gpus(H100, 4), cpus=4, memory_mib=8192)]
    cpus = schedule(Snapshot(tuple(where), tuple(_queue(*[request(1, cpu_milli=1500)] * 4))))
    assert [placed.gpu_uuids for placed in cpus.placements] == [("GPU-n1-0",), ("GPU-n1-1",)]
    assert len(_plan(where, *_queue(*[request(1, memory_mib=3000)] * 4))) == 2
    assert len(_plan(where, *_queue(*[request(2)] * 4))) == 2


def test_fair_shares_fill_a_node_exactly() -> None:
    asked = request(2, cpu_milli=None, memory_mib=None)
    assert len(_plan([h100s("n1")], *_queue(*[asked] * 5))) == 4


WHERE: list[tuple[str, list[NodeView], Request, str | None]] = [
    ("exact fit", [h100s("n1"), h100s("n2", in_use=6), h100s("n3", in_use=5)], request(2), "n2"),
    ("fewest left", [h100s("n1", 2), h100s("n2", 4), h100s("n3", 7)], request(3), "n2"),
    (
        "GPUs before CPUs",
        [h100s("n1", in_use=4, cpu_milli_free=1000), h100s("n2", in_use=6)],
        request(1),
        "n2",
    ),
    (
        "CPUs and memory break a tie of GPUs",
        [h100s("n1"), h100s("n2", cpu_milli_free=8000)],
        request(1),
        "n2",
    ),
    (
        "the small card, though CPUs are tighter beside the large one",
        [node("n1", gpus(H100, 2), cpu_milli_free=1000), node("n2", gpus(A10, 2))],
        request(1),
        "n2",
    ),
    (
        "the smallest that suffices",
        [node("n1", gpus(T4, 2)), node("n2", gpus(H100, 2)), node("n3", gpus(V100, 2))],
        request(1, gpu_min_memory_mib=20_480),
        "n3",
    ),
    ("ids break ties", [h100s("n2"), h100s("n1"), h100s("n3")], request(1), "n1"),
    ("no GPU, no GPU node", [h100s("n1", in_use=8, cpu_milli_free=2000), node("n2")], request(0), "n2"),
    (
        "no GPU, where GPUs are busiest",
        [h100s("n1"), h100s("n2", in_use=7), h100s("n3", in_use=6, cpu_milli_free=1000)],
        request(0),
        "n2",
    ),
    ("not the cordoned one", [h100s("n1", state=NodeState.CORDONED), h100s("n2")], request(1), "n2"),
    ("one model", [node("n1", gpus([H100, H100, A10, A10]))], request(3), None),
    ("one node", [h100s("n1", in_use=6), h100s("n2", in_use=6)], request(3), None),
]


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"), [row[1:] for row in WHERE], ids=[row[0] for row in WHERE]
)
def test_where(nodes: list[NodeView], asked: Request, expected: str | None) -> None:
    assert _went(nodes, asked) == expected


def test_of_two_models_the_exact_fit() -> None:
    placed = place_one([node(cards=gpus([T4, T4, T4, H100, H100]))], request(2), AT)
    assert placed is not None
    assert placed.gpu_uuids == ("GPU-n1-3", "GPU-n1-4")


def test_singles_do_not_break_pairs() -> None:
    queue = _queue(request(1), request(1), request(2))
    plan = schedule(Snapshot((node(cards=gpus(H100, 4, lanes=pairs)),), tuple(queue)))
    assert [placed.gpu_uuids for placed in plan.placements] == [
        ("GPU-n1-0",),
        ("GPU-n1-1",),
        ("GPU-n1-2", "GPU-n1-3"),
    ]


def test_the_placement_says_what_is_taken() -> None:
    placed = place_one([h100s("n1")], request(2, cpu_milli=None, memory_mib=4096), AT)
    assert placed is not None
    assert (placed.instance_id, placed.cpu_milli, placed.memory_mib) == ("i1", 16_000, 4096)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("gpu_count", 2),
        ("gpu_models", ("H100",)),
        ("gpu_milli", 500),
        ("mig_profile", "1g.10gb"),
        ("gpu_min_compute_capability", "8.0"),
        ("same_numa", True),
        ("gpu_min_memory_mib", 1),
        ("cpu_milli", None),
        ("memory_mib", None),
        ("node_selector", {"zone": "a"}),
    ],
)
def test_what_makes_another_shape(field: str, other: Any) -> None:
    assert shape(request(**{field: other})) != shape(request())


def test_the_key_of_what_fails_alike_holds_all_but_who_and_when_and_how_important() -> None:
    other = {"instance_id", "queued_at", "quota", "priority", "preemptible", "gang"}
    assert len(key(request())) == len({field.name for field in fields(Request)} - other)
    assert key(request()) == key(request(instance_id="i2", queued_at=9.0, priority=7))


def test_a_thousand_that_wait_for_the_same_are_told_the_same() -> None:
    full = tuple(h100s(f"n{place}", in_use=8) for place in range(10))
    plan = schedule(Snapshot(full, tuple(_queue(*[request(1, "H100")] * 1000))))
    assert len(plan.unplaced) == 1000
    assert len({id(each.summary) for each in plan.unplaced}) == 1


def test_an_empty_snapshot() -> None:
    plan = schedule(Snapshot((), ()))
    assert (plan.placements, plan.unplaced) == ((), ())
