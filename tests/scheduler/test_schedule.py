"""The order and place of placements, and what a scheduling cycle leaves free."""

from dataclasses import fields, replace
from typing import Any

import pytest

from mooring.scheduler.model import (
    GpuAllocation,
    GpuView,
    MigView,
    NodeView,
    Request,
    ReservedPeriod,
    Snapshot,
    VolumeNeeds,
)
from mooring.scheduler.packing.demand import potential_for
from mooring.scheduler.packing.search import key, shape
from mooring.scheduler.packing.shapes import Shape
from mooring.scheduler.schedule import schedule
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.clusters import A10, AT, H100, T4, gpus, h100s, node, pairs, place_one, request

# One, two, four and eight GPUs are requested equally often, with their share of the CPUs.
ALL_SIZES = potential_for({Shape(count, 1000, None, None): 1.0 for count in (1, 2, 4, 8)})


def _node_for(nodes: list[NodeView], pending: Request) -> str | None:
    plan = schedule(Snapshot(tuple(nodes), (pending,), potential=ALL_SIZES))
    return plan.placements[0].node_id if plan.placements else None


def _plan(nodes: list[NodeView], *pending: Request) -> dict[str, str]:
    plan = schedule(Snapshot(tuple(nodes), pending))
    return {placed.instance_id: placed.node_id for placed in plan.placements}


def _queue(*pending: Request) -> list[Request]:
    return [replace(each, instance_id=f"i{place}", queued_at=place) for place, each in enumerate(pending)]


def test_the_oldest_first_and_ids_break_ties() -> None:
    late, early, twin = (
        request(instance_id="a", queued_at=2.0),
        request(instance_id="z", queued_at=1.0),
        request(instance_id="y", queued_at=1.0),
    )
    assert list(_plan([node(gpu_views=gpus(T4, 2))], late, early, twin)) == ["y", "z"]


def test_a_request_that_does_not_fit_blocks_nothing_behind_it() -> None:
    queue = _queue(request(4, "H100"), request(1, "H100"))
    assert _plan([node(gpu_views=gpus(H100, 2))], *queue) == {"i1": "n1"}


def test_a_cycle_subtracts_what_it_allocates() -> None:
    where = [node(gpu_views=gpus(H100, 4), cpus=4, memory_mib=8192)]
    cpus = schedule(Snapshot(tuple(where), tuple(_queue(*[request(1, cpu_milli=1500)] * 4))))
    assert [placed.gpu_uuids for placed in cpus.placements] == [("GPU-n1-0",), ("GPU-n1-1",)]
    assert len(_plan(where, *_queue(*[request(1, memory_mib=3000)] * 4))) == 2
    assert len(_plan(where, *_queue(*[request(2)] * 4))) == 2


def test_fair_shares_fill_a_node_exactly() -> None:
    pending = request(2, cpu_milli=None, memory_mib=None)
    assert len(_plan([h100s("n1")], *_queue(*[pending] * 5))) == 4


NODE_OF_PLACEMENT: list[tuple[str, list[NodeView], Request, str | None]] = [
    ("exact fit", [h100s("n1"), h100s("n2", in_use=6), h100s("n3", in_use=5)], request(2), "n2"),
    ("no free set of eight is broken up", [h100s("n1"), h100s("n2", 3), h100s("n3")], request(1), "n2"),
    ("no free set of four is broken up", [h100s("n1", 4), h100s("n2", 3), h100s("n3", 4)], request(1), "n2"),
    (
        "CPUs beside free GPUs are left",
        [h100s("n1"), node("n2"), h100s("n3")],
        request(0, cpu_milli=16_000),
        "n2",
    ),
    (
        "CPUs beside allocated GPUs are taken first",
        [h100s("n1"), h100s("n2", in_use=8), h100s("n3")],
        request(0, cpu_milli=16_000),
        "n2",
    ),
    ("not the cordoned one", [h100s("n1", state=NodeState.CORDONED), h100s("n2")], request(1), "n2"),
    ("one model", [node("n1", gpus([H100, H100, A10, A10]))], request(3), None),
    ("one node", [h100s("n1", in_use=6), h100s("n2", in_use=6)], request(3), None),
]


@pytest.mark.parametrize(
    ("nodes", "pending", "expected"),
    [row[1:] for row in NODE_OF_PLACEMENT],
    ids=[row[0] for row in NODE_OF_PLACEMENT],
)
def test_the_node_of_a_placement(nodes: list[NodeView], pending: Request, expected: str | None) -> None:
    assert _node_for(nodes, pending) == expected


def test_of_equal_nodes_the_same_is_chosen_in_any_order() -> None:
    cluster = [h100s(f"n{place}") for place in range(6)]
    assert len({_node_for(cluster[place:] + cluster[:place], request(1)) for place in range(6)}) == 1


def test_the_preferred_model_on_any_node() -> None:
    cluster = [node("n1", gpus(A10, 1, on="n1")), h100s("n2"), h100s("n3", 8)]
    assert _node_for(cluster, request(1, gpu_models=("H100", "A10"))) == "n2"
    assert _node_for(cluster, request(1, gpu_models=("A10", "H100"))) == "n1"
    assert _node_for([cluster[0], cluster[2]], request(1, gpu_models=("H100", "A10"))) == "n1"


@pytest.mark.parametrize("pending", [request(1), request(2), request(1, gpu_milli=500)])
def test_the_smallest_gpu_is_used_if_any_will_do(pending: Request) -> None:
    """In any order of the nodes, and whichever size the fleet sees first."""
    for large, small in (("n1", "n2"), ("n2", "n1"), ("n3", "n4"), ("n4", "n3")):
        nodes = [node(large, gpus(H100, 2, on=large)), node(small, gpus(T4, 2, on=small))]
        assert _node_for(nodes, pending) == _node_for(nodes[::-1], pending) == small
    mixed = place_one([node(gpu_views=gpus([H100, H100, A10, A10]))], pending, AT)
    assert mixed is not None
    assert set(mixed.gpu_uuids) <= {"GPU-n1-2", "GPU-n1-3"}
    older = tuple(replace(gpu, compute_capability="7.0") for gpu in gpus(H100, 2, on="n5"))
    newer = tuple(replace(gpu, compute_capability="9.0") for gpu in gpus(H100, 2, on="n6"))
    assert _node_for([node("n5", older), node("n6", newer)], pending) == "n5"


def test_gpus_reserved_for_the_project_come_first() -> None:
    unreserved = h100s("n1")
    period = ReservedPeriod("r1", "p", -10.0, 10.0)
    gpu_views = tuple(replace(gpu, reserved=(period,)) if gpu.index > 5 else gpu for gpu in unreserved.gpus)
    # Two GPUs are free on another node, and better for any other project.
    cluster = (replace(unreserved, gpus=gpu_views), h100s("n2", 6))
    pending = (request(2, project_id="p"), request(2, instance_id="i2", project_id="q"))
    plan = schedule(Snapshot(cluster, pending, potential=ALL_SIZES))
    given = {each.instance_id: each.gpu_uuids for each in plan.placements}
    assert given == {"i1": ("GPU-n1-6", "GPU-n1-7"), "i2": ("GPU-n2-6", "GPU-n2-7")}


def _apart(numa_nodes: tuple[int, ...], *reserved: int) -> NodeView:
    """Two A10 and two H100, some of which are reserved for the project `p`."""
    period = ReservedPeriod("r", "p", 0.0, 1000.0)
    gpu_views = zip(gpus([A10, A10, H100, H100]), numa_nodes, strict=True)
    return node(
        gpu_views=tuple(
            replace(gpu, numa_node=numa_node, reserved=(period,) if place in reserved else ())
            for place, (gpu, numa_node) in enumerate(gpu_views)
        )
    )


@pytest.mark.parametrize("numa_nodes", [(0, 1, 0, 0), (0, 0, 0, 1)])
def test_same_numa_uses_another_model_if_one_is_spread_over_numa_nodes(numa_nodes: tuple[int, ...]) -> None:
    where = _apart(numa_nodes)
    near = place_one([where], request(2, same_numa=True), AT)
    assert near is not None
    numa = {gpu.numa_node for gpu in where.gpus if gpu.uuid in near.gpu_uuids}
    assert numa == {0}


def test_same_numa_skips_reserved_gpus_that_are_far_apart() -> None:
    """On one node, the reserved GPUs are on two NUMA nodes; on the other node, they are on one."""
    other = _apart((0, 0, 0, 0), 2, 3)
    gpu_views = tuple(replace(gpu, uuid=f"{gpu.uuid}-far") for gpu in _apart((0, 1, 0, 0), 0, 1).gpus)
    own = request(2, same_numa=True, project_id="p")
    for far in ("n2", "n3", "n4", "n5"):
        placed = place_one([replace(other, gpus=gpu_views, id=far), other], own, AT)
        assert placed is not None
        assert placed.gpu_uuids == ("GPU-n1-2", "GPU-n1-3")


def test_the_link_score_rates_the_allocated_gpus() -> None:
    gpu_views = gpus(H100, 4, lanes=pairs)
    assert [_score(gpu_views, 2), _score(gpus(H100, 4, lanes=pairs, in_use=(0, 3)), 2)] == [1.0, 0.0]
    assert _score(gpus(H100, 4), 2) == 1.0  # no set is connected, so none is better
    assert _score(gpu_views, 1) is None


def _score(gpu_views: tuple[GpuView, ...], count: int) -> float | None:
    placed = place_one([node(gpu_views=gpu_views)], request(count), AT)
    assert placed is not None
    return placed.link_score


def test_a_share_goes_to_the_gpu_that_is_already_shared() -> None:
    first, second = gpus(H100, 2)
    cluster = node(gpu_views=(first, replace(second, milli_free=500, project_id="p")))
    placed = place_one([cluster], request(1, gpu_milli=250, project_id="p"), AT)
    assert placed is not None
    assert placed.allocations == (GpuAllocation(second.uuid, 250),)
    of_another = place_one([cluster], request(1, gpu_milli=250, project_id="q"), AT)
    assert of_another is not None
    assert of_another.allocations == (GpuAllocation(first.uuid, 250),)


def test_mig_devices_come_from_the_gpu_with_the_fewest_free() -> None:
    first, second = (
        replace(
            gpu,
            mig_enabled=True,
            mig=tuple(MigView(f"{gpu.uuid}-{part}", "1g.10gb", free=part < free) for part in range(3)),
        )
        for gpu, free in zip(gpus(H100, 2), (3, 1), strict=True)
    )
    pending = request(2, mig_profile="1g.10gb", gpu_milli=142)
    placed = place_one([node(gpu_views=(first, second))], pending, AT)
    assert placed is not None
    assert [allocation.mig_uuid for allocation in placed.allocations] == [
        f"{second.uuid}-0",
        f"{first.uuid}-0",
    ]
    assert place_one([node(gpu_views=(first, second))], replace(pending, gpu_count=5), AT) is None


def test_singles_do_not_break_pairs() -> None:
    queue = _queue(request(1), request(1), request(2))
    plan = schedule(Snapshot((node(gpu_views=gpus(H100, 4, lanes=pairs)),), tuple(queue)))
    assert [placed.gpu_uuids for placed in plan.placements] == [
        ("GPU-n1-0",),
        ("GPU-n1-1",),
        ("GPU-n1-2", "GPU-n1-3"),
    ]


def test_the_placement_has_the_cpus_and_memory() -> None:
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
def test_fields_that_change_the_shape(field: str, other: Any) -> None:
    assert shape(request(**{field: other})) != shape(request())


def test_the_key_has_all_fields_but_identity_age_and_priority() -> None:
    other = {"instance_id", "queued_at", "quota", "priority", "preemptible", "gang"}
    values: dict[str, Any] = {
        "gpu_count": 2,
        "gpu_models": ("H100",),
        "gpu_min_memory_mib": 1,
        "cpu_milli": None,
        "memory_mib": None,
        "node_selector": {"zone": "a"},
        "project_id": "p",
        "gpu_milli": 500,
        "mig_profile": "1g.10gb",
        "gpu_min_compute_capability": "9.0",
        "same_numa": True,
        "max_duration_s": 60,
        "project_selector": {"zone": "b"},
        "disk_mib": 1024,
        "disk_limits": True,
        "stands_for": 2,
        "volume_needs": VolumeNeeds(node_ids=frozenset({"n"}), selector=(), where=""),
    }
    assert values.keys() == {field.name for field in fields(Request)} - other
    changed = [key(request(**{field: value})) for field, value in values.items()]
    assert len({key(request()), *changed}) == 1 + len(values)
    assert key(request()) == key(request(instance_id="i2", queued_at=9.0, priority=7))


def test_equal_requests_share_one_explanation() -> None:
    full = tuple(h100s(f"n{place}", in_use=8) for place in range(10))
    plan = schedule(Snapshot(full, tuple(_queue(*[request(1, "H100")] * 1000))))
    assert len(plan.unplaced) == 1000
    assert len({id(each.summary) for each in plan.unplaced}) == 1


def test_an_empty_snapshot() -> None:
    plan = schedule(Snapshot((), ()))
    assert (plan.placements, plan.unplaced) == ((), ())
