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


def cpu_request(disk_mib: int | None = None, **changes: Any) -> Request:
    return request(0, disk_mib=disk_mib, **changes)


def reasons(view: NodeView, pending: Request) -> list[tuple[str, str, str]]:
    return [(each.code, each.wanted, each.had) for each in refusals(view, pending, AT)]


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


def with_instances(view: NodeView, *instances: Running) -> NodeView:
    free = view.disk_mib_free - sum(each.disk_mib for each in instances)
    return replace(view, running=instances, disk_mib_free=free)


@pytest.mark.parametrize(
    ("fields", "disk_mib", "expected"),
    [
        ({"disk_mib": 1000 * GIB}, 1000 * GIB, []),
        ({"disk_mib": 1000 * GIB}, 1001 * GIB, [("insufficient_disk", "1001 GiB", "1000 GiB")]),
        ({"disk_mib": None}, GIB, [("insufficient_disk", "1 GiB", "unknown: its agent does not report it")]),
        ({"disk_mib": None}, None, []),
        ({"disk_mib": 8 * GIB}, None, []),
    ],
)
def test_a_request_fits_the_disk_or_is_refused(
    fields: dict[str, Any], disk_mib: int | None, expected: list[Any]
) -> None:
    view = node(**fields)
    assert reasons(view, cpu_request(disk_mib)) == expected
    assert (place_one([view], cpu_request(disk_mib), AT) is None) == bool(expected)


def test_an_instance_without_disk_mib_gets_the_default() -> None:
    large, small = node(disk_mib=1000 * GIB), node(disk_mib=64 * GIB)
    for view, given in ((large, DEFAULT_DISK_MIB), (small, 2 * GIB), (node(), DEFAULT_DISK_MIB)):
        placed = place_one([view], cpu_request(), AT)
        assert placed is not None
        assert placed.disk_mib == given


def test_pressure_and_limits_close_a_node() -> None:
    view = node(disk_mib=1000 * GIB)
    assert [code for code, *_ in reasons(replace(view, disk_pressure=True), cpu_request())] == [
        "disk_pressure"
    ]
    assert [code for code, *_ in reasons(view, cpu_request(disk_limits=True))] == ["disk_not_limited"]
    assert reasons(replace(view, disk_enforced=True), cpu_request(disk_limits=True)) == []
    for closed, pending in (
        (replace(view, disk_pressure=True), cpu_request()),
        (view, cpu_request(disk_limits=True)),
    ):
        assert place_one([closed], pending, AT) is None


def test_placements_of_one_cycle_add_up() -> None:
    nodes = (node("n1", disk_mib=100 * GIB), node("n2", disk_mib=100 * GIB))
    pending = tuple(cpu_request(60 * GIB, instance_id=f"i{number}") for number in range(3))
    plan = schedule(Snapshot(nodes, pending), CycleCache())
    assert sorted(placed.node_id for placed in plan.placements) == ["n1", "n2"]
    (waiting,) = plan.unplaced
    assert waiting.code == "waiting_for_capacity"
    assert "60 GiB of disk" in waiting.summary
    assert "insufficient_disk wanted 60 GiB had 40 GiB" in waiting.summary


def test_more_than_any_node_has_is_never_placeable() -> None:
    waiting = unplaced([node(disk_mib=100 * GIB)], cpu_request(101 * GIB), AT)
    assert (waiting.ever, waiting.code) == (False, "never_placeable")


def test_the_forecast_waits_for_disk_until_a_declared_end() -> None:
    view = with_instances(node(disk_mib=100 * GIB), running("r", 80 * GIB, ends_at=1000.0))
    plan = schedule(Snapshot((view,), (cpu_request(50 * GIB),), now=10.0), CycleCache())
    (forecast,) = plan.forecasts
    assert forecast.starts_at == 1030.0
    assert forecast.waits_for == ("r",)


def test_preemption_frees_disk() -> None:
    view = with_instances(
        node(disk_mib=100 * GIB),
        running("large", 80 * GIB, preemptible=True, priority=10),
        running("small", 10 * GIB, preemptible=True, priority=10),
    )
    plan = schedule(Snapshot((view,), (cpu_request(50 * GIB, priority=90),), now=10_000.0), CycleCache())
    assert [eviction.instance_id for eviction in plan.evictions] == ["large"]


def test_a_quota_counts_the_default() -> None:
    quota = Quota({"disk_mib": 15 * GIB}, {}, {"disk_mib": 20 * GIB})
    nodes, project = (node(disk_mib=1000 * GIB),), "p"
    pending = tuple(cpu_request(instance_id=f"i{number}", project_id=project) for number in range(2))
    plan = schedule(Snapshot(nodes, pending, quotas={project: quota}), CycleCache())
    assert len(plan.placements) == 1
    assert plan.unplaced[0].code == "quota"
    assert "15 GiB" in plan.unplaced[0].summary


def test_the_summary_names_the_disk_of_the_closest_node_in_any_order_of_nodes() -> None:
    unreported = replace(node("n1"), disk_mib=None)
    small = node("n2", disk_mib=8 * GIB)
    pending = cpu_request(disk_limits=True)
    summaries = {unplaced(nodes, pending, AT).summary for nodes in ([unreported, small], [small, unreported])}
    assert len(summaries) == 1
    assert "and 10 GiB of disk (closest: gpu-n1: disk_not_limited" in summaries.pop()
