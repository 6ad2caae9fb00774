"""How many instances still fit, and which free GPUs are unusable."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from mooring.scheduler.model import MigView, NodeView, PlanTime, Request, ReservedPeriod, Snapshot
from mooring.scheduler.packing.fragmentation import fragmentation
from mooring.scheduler.schedule import schedule
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.backfill.test_planner import running
from tests.scheduler.busy import NOW, snapshots
from tests.scheduler.clusters import A10, AT, H100, gpus, node, request

HALF = running(node("n1", gpus(H100, 8)), 0, 1, 2, ends_in=None)


def test_what_still_fits() -> None:
    figures = fragmentation([HALF, node("n2", gpus([H100, H100, A10], on="n2"))], AT)
    assert list(figures) == [A10, H100]
    of_h100 = figures[H100]
    assert (of_h100.gpus, of_h100.gpus_free, of_h100.gpu_milli_free) == (10, 7, 7000)
    assert of_h100.fits == {1: 7, 2: 3, 4: 1, 8: 0}
    assert of_h100.shares_fit == {250: 28, 500: 14}
    assert of_h100.stranded_milli == {}
    assert figures[A10].fits == {1: 1, 2: 0, 4: 0, 8: 0}


def _first(where: NodeView, **changes: Any) -> NodeView:
    return replace(where, gpus=(replace(where.gpus[0], **changes), *where.gpus[1:]))


TWO = node("n1", gpus(H100, 2))
RESERVED = ReservedPeriod("r1", "p", NOW - 1, NOW + 1)


@pytest.mark.parametrize(
    ("where", "stranded", "left"),
    [
        (replace(TWO, state=NodeState.CORDONED), {"node_cordoned": 2000}, 0),
        (replace(TWO, state=NodeState.UNREACHABLE), {"node_unreachable": 2000}, 0),
        (_first(TWO, healthy=False), {"quarantined": 1000}, 1),
        (_first(TWO, milli_free=300, project_id="p"), {"shared_rest": 300}, 1),
        (_first(TWO, reserved=(RESERVED,)), {"reserved": 1000}, 1),
        (_first(TWO, reserved=(replace(RESERVED, from_at=NOW + 1, to_at=NOW + 2),)), {}, 2),
        (replace(TWO, cpu_milli_free=0), {"no_cpu_left": 2000}, 0),
        (replace(TWO, cpu_milli_free=32_000), {"no_cpu_left": 1000}, 1),
        (replace(TWO, memory_mib_free=1000), {"no_memory_left": 2000}, 0),
    ],
)
def test_stranded_gpus(where: NodeView, stranded: dict[str, int], left: int) -> None:
    figures = fragmentation([where], PlanTime(NOW))[H100]
    assert figures.stranded_milli == stranded
    assert figures.fits[1] == left


def test_a_gpu_with_mig_enabled_counts_by_its_devices() -> None:
    devices = (MigView("MIG-1", "1g.10gb", free=True), MigView("MIG-2", "3g.40gb", free=False))
    figures = fragmentation([_first(TWO, mig_enabled=True, mig=devices)], AT)[H100]
    assert (figures.gpus, figures.mig_free) == (1, {"1g.10gb": 1})


@settings(deadline=None, max_examples=30)
@given(snapshots())
def test_no_more_can_be_placed_than_is_reported_to_fit(snapshot: Snapshot) -> None:
    """And no fewer, if nothing is reserved. For a project without instances and reservations, per size."""
    for model, figures in fragmentation(snapshot.nodes, snapshot.at).items():
        for size in (1, 2):
            pending = tuple(_whole(f"i{number}", size, model) for number in range(figures.fits[size] + 1))
            has_reserved = any(gpu.reserved for each in snapshot.nodes for gpu in each.gpus)
            plan = schedule(replace(snapshot, requests=pending, projects={}))
            fitted = len(plan.placements)
            assert fitted == figures.fits[size] or (has_reserved and fitted < figures.fits[size])


def _whole(instance_id: str, count: int, model: str) -> Request:
    pending = request(count, model, cpu_milli=None, memory_mib=None)
    return replace(pending, instance_id=instance_id, project_id="new", priority=0)
