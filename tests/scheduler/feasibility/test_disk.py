"""Disk space in placement, forecasts and explanations."""

from dataclasses import replace
from typing import Any

import pytest

from mooring.core.disk import DEFAULT_DISK_MIB
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.explain.reasons import unplaced
from mooring.scheduler.feasibility.filters import refusals
from mooring.scheduler.model import NodeView, Quota, Request, Running, Snapshot
from mooring.scheduler.schedule import schedule
from tests.scheduler.clusters import AT, node, place_one, request

GIB = 1024


def asks(disk_mib: int | None = None, **changes: Any) -> Request:
    return request(0, disk_mib=disk_mib, **changes)


def codes(there: NodeView, asked: Request) -> list[tuple[str, str, str]]:
    return [(each.code, each.wanted, each.had) for each in refusals(there, asked, AT)]


def running(instance_id: str, disk_mib: int, **changes: Any) -> Running:
    made = Running(
        instance_id=instance_id,
        project_id="p",
        allocations=(),
        cpu_milli=1000,
        memory_mib=1024,
        priority=50,
        preemptible=False,
        since=0.0,
        ends_at=None,
        disk_mib=disk_mib,
    )
    return replace(made, **changes)


def with_instances(there: NodeView, *held: Running) -> NodeView:
    free = there.disk_mib_free - sum(each.disk_mib for each in held)
    return replace(there, running=held, disk_mib_free=free)


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        ({"disk_mib": 1000 * GIB}, 1000 * GIB, []),
        ({"disk_mib": 1000 * GIB}, 1001 * GIB, [("insufficient_disk", "1001 GiB", "1000 GiB")]),
        ({"disk_mib": None}, GIB, [("insufficient_disk", "1 GiB", "unknown: its agent does not report it")]),
        ({"disk_mib": None}, None, []),
        ({"disk_mib": 8 * GIB}, None, []),
    ],
)
def test_a_node_has_the_disk_or_a_refusal(
    there: dict[str, Any], asked: int | None, expected: list[Any]
) -> None:
    made = node(**there)
    assert codes(made, asks(asked)) == expected
    assert (place_one([made], asks(asked), AT) is None) == bool(expected)


def test_an_instance_without_disk_mib_gets_the_default() -> None:
    large, small = node(disk_mib=1000 * GIB), node(disk_mib=64 * GIB)
    for there, given in ((large, DEFAULT_DISK_MIB), (small, 2 * GIB), (node(), DEFAULT_DISK_MIB)):
        placed = place_one([there], asks(), AT)
        assert placed is not None
        assert placed.disk_mib == given


def test_pressure_and_limits_close_a_node() -> None:
    there = node(disk_mib=1000 * GIB)
    assert [code for code, *_ in codes(replace(there, disk_pressure=True), asks())] == ["disk_pressure"]
    assert [code for code, *_ in codes(there, asks(disk_limits=True))] == ["disk_not_limited"]
    assert codes(replace(there, disk_enforced=True), asks(disk_limits=True)) == []
    for closed, asked in ((replace(there, disk_pressure=True), asks()), (there, asks(disk_limits=True))):
        assert place_one([closed], asked, AT) is None


def test_placements_of_one_cycle_add_up() -> None:
    there = (node("n1", disk_mib=100 * GIB), node("n2", disk_mib=100 * GIB))
    asked = tuple(asks(60 * GIB, instance_id=f"i{number}") for number in range(3))
    plan = schedule(Snapshot(there, asked), CycleCache())
    assert sorted(placed.node_id for placed in plan.placements) == ["n1", "n2"]
    (waits,) = plan.unplaced
    assert waits.code == "waiting_for_capacity"
    assert "60 GiB of disk" in waits.summary
    assert "insufficient_disk wanted 60 GiB had 40 GiB" in waits.summary


def test_more_than_any_node_has_is_never_placeable() -> None:
    waiting = unplaced([node(disk_mib=100 * GIB)], asks(101 * GIB), AT)
    assert (waiting.ever, waiting.code) == (False, "never_placeable")


def test_the_forecast_waits_for_disk_until_a_declared_end() -> None:
    there = with_instances(node(disk_mib=100 * GIB), running("r", 80 * GIB, ends_at=1000.0))
    plan = schedule(Snapshot((there,), (asks(50 * GIB),), now=10.0), CycleCache())
    (forecast,) = plan.forecasts
    assert forecast.starts_at == 1030.0
    assert forecast.waits_for == ("r",)


def test_preemption_frees_disk() -> None:
    there = with_instances(
        node(disk_mib=100 * GIB),
        running("large", 80 * GIB, preemptible=True, priority=10),
        running("small", 10 * GIB, preemptible=True, priority=10),
    )
    plan = schedule(Snapshot((there,), (asks(50 * GIB, priority=90),), now=10_000.0), CycleCache())
    assert [eviction.instance_id for eviction in plan.evictions] == ["large"]


def test_a_quota_counts_the_default() -> None:
    quota = Quota({"disk_mib": 15 * GIB}, {}, {"disk_mib": 20 * GIB})
    there, project = (node(disk_mib=1000 * GIB),), "p"
    asked = tuple(asks(instance_id=f"i{number}", project_id=project) for number in range(2))
    plan = schedule(Snapshot(there, asked, quotas={project: quota}), CycleCache())
    assert len(plan.placements) == 1
    assert plan.unplaced[0].code == "quota"
    assert "15 GiB" in plan.unplaced[0].summary


def test_the_summary_has_the_disk_of_the_closest_node_in_any_order() -> None:
    unreported = replace(node("n1"), disk_mib=None)
    small = node("n2", disk_mib=8 * GIB)
    asked = asks(disk_limits=True)
    summaries = {unplaced(nodes, asked, AT).summary for nodes in ([unreported, small], [small, unreported])}
    assert len(summaries) == 1
    assert "and 10 GiB of disk (closest: gpu-n1: disk_not_limited" in summaries.pop()
