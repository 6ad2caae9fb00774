"""Members of a gang are placed all or none, and close together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest

from mooring.scheduler.model import Gang, NodeView, ProjectView, Quota, Request, Running
from mooring.scheduler.schedule import schedule
from tests.scheduler.backfill.test_planner import at, placed, running, waits
from tests.scheduler.busy import NOW, with_running
from tests.scheduler.clusters import H100, gpus, node


def node_with(node_id: str, free: int, **changes: Any) -> NodeView:
    """A node of eight H100, of which the last `free` are free."""
    return replace(node(node_id, gpus(H100, 8, on=node_id, in_use=tuple(range(8 - free)))), **changes)


def gang(
    count: int, gpu_count: int, network: Literal["overlay", "host"] = "host", **changes: Any
) -> tuple[Request, ...]:
    return tuple(
        waits(f"g{number}", gpu_count, gang=Gang("g", count, network), **changes) for number in range(count)
    )


def labels(**values: str) -> Mapping[str, Any]:
    return {"labels": values}


def with_member(view: NodeView) -> NodeView:
    """The node with a member of the gang that has no GPU."""
    running_member = Running(
        "g-old", "p", (), 100, 100, 50, preemptible=False, since=NOW, ends_at=None, group_id="g"
    )
    return with_running(view, running_member)


def test_all_or_none() -> None:
    fitting = schedule(at([node_with("n1", 4), node_with("n2", 2)], *gang(3, 2)))
    assert placed(fitting).keys() == {"g0", "g1", "g2"}
    plan = schedule(at([node_with("n1", 4), node_with("n2", 1)], *gang(3, 2)))
    assert not plan.placements
    assert {each.code for each in plan.unplaced} == {"waiting_for_capacity"}
    assert "no room for all 3 members" in plan.unplaced[0].summary


def test_a_gang_that_does_not_fit_leaves_the_gpus_to_others() -> None:
    plan = schedule(at([node_with("n1", 4)], *gang(3, 2), waits("small", 4, ahead=-10)))
    assert placed(plan) == {"small": "n1"}


def test_a_gang_that_does_not_fit_beside_stopping_instances_leaves_the_gpus_to_others() -> None:
    """Its placement is also tried without the stopping instances; both what-if changes are undone."""
    stopping = running(node("n2", gpus(H100, 1, on="n2", quarantined=(0,))), 0, ends_in=20, stopping=True)
    plan = schedule(at([node_with("n1", 2), stopping], *gang(3, 1), waits("small", 2, ahead=-10)))
    assert placed(plan) == {"small": "n1"}


@pytest.mark.parametrize(
    ("count", "gpu_count", "network", "changes", "most"),
    [
        (8, 2, "host", {}, 8),
        (9, 2, "host", {}, 8),
        (4, 3, "host", {}, 4),  # two members on each node, which leave two of its eight GPUs
        (5, 3, "host", {}, 4),
        (4, 2, "overlay", {}, 4),  # without a swarm, all members are on one node
        (5, 2, "overlay", {}, 4),
        (8, 2, "overlay", {"swarm": "s"}, 8),
        (9, 2, "overlay", {"swarm": "s"}, 8),
        (5, 1, "host", {"cpu_milli": 2500}, 4),  # two members with a CPU each on each node
        (5, 1, "host", {"labels": {"zone": "b"}}, 0),
    ],
)
def test_whether_a_gang_can_ever_fit(
    count: int, gpu_count: int, network: Literal["overlay", "host"], changes: dict[str, Any], most: int
) -> None:
    nodes = [node_with("n1", 0, **changes), node_with("n2", 0, **changes)]
    selector = {"zone": "a"} if "labels" in changes else {}
    plan = schedule(at(nodes, *gang(count, gpu_count, network, cpu_milli=1000, node_selector=selector)))
    (code,) = {waiting.code for waiting in plan.unplaced}
    assert code == ("never_placeable" if most < count else "waiting_for_capacity")
    if 0 < most < count:
        assert plan.unplaced[0].summary.endswith(f"could host {most}")


def test_a_gang_waits_for_all_of_its_members() -> None:
    plan = schedule(at([node_with("n1", 8)], *gang(3, 1)[:2]))
    assert {each.code for each in plan.unplaced} == {"waiting_for_members"}


NEAR: list[tuple[str, list[NodeView], set[str]]] = [
    ("one node", [node_with("n1", 3), node_with("n2", 4), node_with("n3", 3)], {"n2"}),
    (
        "one fabric",
        [
            node_with("n1", 3, **labels(fabric="a")),
            node_with("n2", 2, **labels(fabric="b")),
            node_with("n3", 2, **labels(fabric="b")),
        ],
        {"n2", "n3"},
    ),
    (
        "one zone, as no fabric has room",
        [
            node_with("n1", 2, **labels(fabric="a", zone="x")),
            node_with("n2", 2, **labels(fabric="b", zone="y")),
            node_with("n3", 2, **labels(fabric="c", zone="y")),
        ],
        {"n2", "n3"},
    ),
    (
        "one swarm",
        [node_with("n1", 2), node_with("n2", 2, swarm="s"), node_with("n3", 2, swarm="s")],
        {"n2", "n3"},
    ),
    ("any", [node_with("n1", 2), node_with("n2", 1), node_with("n3", 2)], {"n1", "n3"}),
]


@pytest.mark.parametrize(("nodes", "expected"), [row[1:] for row in NEAR], ids=[row[0] for row in NEAR])
def test_members_are_placed_close_together(nodes: list[NodeView], expected: set[str]) -> None:
    assert set(placed(schedule(at(nodes, *gang(2, 2)))).values()) == expected


@pytest.mark.parametrize(
    ("swarms", "fits"),
    [(("s", "s"), True), (("s", "t"), False), ((None, None), False), (("s", None), False)],
)
def test_an_overlay_spans_one_swarm(swarms: tuple[str | None, str | None], *, fits: bool) -> None:
    nodes = [node_with(f"n{number}", 2, swarm=swarm) for number, swarm in enumerate(swarms)]
    plan = schedule(at(nodes, *gang(2, 2, "overlay")))
    assert len(plan.placements) == (2 if fits else 0)
    assert len(schedule(at(nodes, *gang(2, 2, "host"))).placements) == 2


def test_an_overlay_on_one_node_needs_no_swarm() -> None:
    assert len(schedule(at([node_with("n1", 4)], *gang(2, 2, "overlay"))).placements) == 2


def test_a_restarted_member_joins_the_others() -> None:
    nodes = [node_with("n1", 2), with_member(node_with("n2", 2)), node_with("n3", 2)]
    assert placed(schedule(at(nodes, gang(2, 1)[0]))) == {"g0": "n2"}
    near = [
        node_with("n1", 2),
        with_member(node_with("n2", 0, **labels(zone="z"))),
        node_with("n3", 2, **labels(zone="z")),
    ]
    assert placed(schedule(at(near, gang(2, 1)[0]))) == {"g0": "n3"}


def test_a_restarted_member_stays_in_the_swarm_of_an_overlay() -> None:
    nodes = [node_with("n1", 2, swarm="t"), with_member(node_with("n2", 0, swarm="s"))]
    assert not schedule(at(nodes, gang(2, 1, "overlay")[0])).placements
    nodes.append(node_with("n3", 2, swarm="s"))
    assert placed(schedule(at(nodes, gang(2, 1, "overlay")[0]))) == {"g0": "n3"}


def test_unequal_members() -> None:
    large, small = gang(2, 1)
    plan = schedule(at([node_with("n1", 1), node_with("n2", 6)], replace(large, gpu_count=6), small))
    assert placed(plan) == {"g0": "n2", "g1": "n1"}


def test_a_quota_permits_all_members_or_none() -> None:
    snapshot = at([node_with("n1", 8)], *gang(3, 2))
    quota = Quota({"gpus": 5000}, {}, {"gpus": 6000})
    plan = schedule(replace(snapshot, quotas={"p": quota}))
    assert not plan.placements
    assert not plan.forecasts
    assert {each.code for each in plan.unplaced} == {"quota"}


def test_a_gang_gets_the_first_start_time_with_room_for_all() -> None:
    first, second = (node(name, gpus(H100, 2, on=name)) for name in ("n1", "n2"))
    nodes = [running(first, 0, 1, ends_in=100), running(second, 0, 1, ends_in=600)]
    plan = schedule(at(nodes, *gang(2, 2), waits("long", 2, max_duration_s=5000, ahead=-10)))
    assert {each.starts_at for each in plan.forecasts} == {NOW + 630}
    assert {each.node_ids for each in plan.forecasts} == {("n1",), ("n2",)}
    free = [first, running(second, 0, 1, ends_in=600)]
    late = schedule(at(free, *gang(2, 2), waits("long", 2, max_duration_s=5000, ahead=-10)))
    assert not late.placements
    short = schedule(at(free, *gang(2, 2), waits("short", 2, max_duration_s=600, ahead=-10)))
    assert placed(short) == {"short": "n1"}


def test_preemption_for_a_gang_frees_all_or_nothing() -> None:
    spot: dict[str, Any] = {"preemptible": True, "priority": 30}
    nodes = [running(node(name, gpus(H100, 2, on=name)), 0, 1, ends_in=None, **spot) for name in ("n1", "n2")]
    plan = schedule(at(nodes, *gang(2, 2, priority=70)))
    assert {each.instance_id for each in plan.evictions} == {"r0-n1", "r0-n2"}
    assert not schedule(at(nodes, *gang(3, 2, priority=70))).evictions


def test_gpus_are_reclaimed_for_a_whole_gang_or_not_at_all() -> None:
    nodes = [
        running(node(name, gpus(H100, 2, on=name)), 0, 1, ends_in=None, project_id="other")
        for name in ("n1", "n2")
    ]
    snapshot = at(nodes, *gang(2, 2))
    with_guarantee = replace(snapshot, projects={"p": ProjectView(guaranteed_gpu_milli=4000)})
    assert len(schedule(with_guarantee).evictions) == 2
    with_less = replace(snapshot, projects={"p": ProjectView(guaranteed_gpu_milli=3000)})
    assert not schedule(with_less).evictions
