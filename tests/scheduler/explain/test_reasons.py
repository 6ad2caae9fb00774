"""Explanations of pending requests."""

from typing import Any

import pytest

from mooring.scheduler.explain.reasons import FittingAlternatives, explain, would_fit
from mooring.scheduler.model import NodeView, Request, Snapshot, Unplaced
from mooring.scheduler.schedule import schedule
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.clusters import A10, AT, H100, T4, gpus, h100s, node, request


def _unplaced(nodes: list[NodeView], pending: Request) -> Unplaced:
    plan = schedule(Snapshot(tuple(nodes), (pending,)))
    assert not plan.placements
    return plan.unplaced[0]


def _cordoned(node_id: str, **changes: Any) -> NodeView:
    return h100s(node_id, state=NodeState.CORDONED, **changes)


CPU_NODE = node("n9", state=NodeState.READY)
BIG = {"cpu_milli": 16_000, "memory_mib": 65_536}

WAITING: list[tuple[list[NodeView], Request, str]] = [
    ([h100s("n1", 8), h100s("n2", 7)], request(2, "H100"), "no node has 2 free H100 (best: 1 on gpu-n2)"),
    ([h100s("n1", 8)], request(1), "no node has 1 free GPU (all are in use or quarantined)"),
    (
        [h100s("n1", 7), _cordoned("n2")],
        request(2, "H100"),
        "no ready node has 2 free H100 (best: 1 on gpu-n1)",
    ),
    (
        [h100s("n1", 8, labels={"zone": "a"}), h100s("n2")],
        request(2, "H100", node_selector={"zone": "a"}),
        "no node with zone=a has 2 free H100 (all are in use or quarantined)",
    ),
    (
        [h100s("n1", 8)],
        request(2, gpu_min_memory_mib=40_960),
        "no node has 2 free GPUs of one model of at least 40 GiB (all are in use or quarantined)",
    ),
    ([_cordoned("n1"), _cordoned("n2"), _cordoned("n3")], request(1), "all 3 nodes are cordoned"),
    ([_cordoned("n1"), CPU_NODE], request(1, "H100"), "the only suitable node, gpu-n1, is cordoned"),
    ([_cordoned("n1"), _cordoned("n2"), CPU_NODE], request(1), "all 2 suitable nodes are cordoned"),
    (
        [_cordoned("n1"), h100s("n2", state=NodeState.NOT_READY), _cordoned("n3")],
        request(1),
        "no node is ready (2 cordoned, 1 not ready)",
    ),
    (
        [h100s("n7", cpu_milli_free=4000), h100s("n8", cpu_milli_free=1000), h100s("n1", in_use=8)],
        request(2, "H100", **BIG),
        "no node has 16 CPUs and 64 GiB free beside 2 free H100"
        " (closest: gpu-n7: insufficient_cpu wanted 16 had 4)",
    ),
    (
        [h100s("n1", cpu_milli_free=0, memory_mib_free=0)],
        request(2, "H100", cpu_milli=None, memory_mib=None),
        "no node has the fair share of CPUs and memory free beside 2 free H100 (closest: gpu-n1:"
        " insufficient_cpu wanted 16 had 0, insufficient_memory wanted 128450 MiB had 0 GiB)",
    ),
    (
        [node("n1", memory_mib_free=512)],
        request(0, cpu_milli=None, memory_mib=None),
        "no node has 1 CPU and 1 GiB free (closest: gpu-n1: insufficient_memory wanted 1 GiB had 512 MiB)",
    ),
]

NEVER_PLACEABLE: list[tuple[list[NodeView], Request, str]] = [
    ([h100s("n1"), CPU_NODE], request(1, "H200"), "no node has any H200"),
    ([CPU_NODE], request(1), "no node has any GPU"),
    ([_cordoned("n1", in_use=8)], request(16, "H100"), "no node has 16 H100 (best: 8 on gpu-n1)"),
    (
        [node("n1", gpus(T4)), node("n2", gpus(A10))],
        request(1, gpu_min_memory_mib=40_960),
        "no node has any GPU of at least 40 GiB (largest: 23028 MiB on gpu-n2)",
    ),
    ([h100s("n1")], request(1, node_selector={"zone": "a"}), "no node has the label zone=a"),
    (
        [h100s("n1", labels={"zone": "a"})],
        request(1, node_selector={"zone": "a", "disk": "nvme"}),
        "no node has the labels disk=nvme, zone=a",
    ),
    (
        [h100s("n1", cpu_milli_free=0)],
        request(1, "H100", cpu_milli=65_000),
        "no node has 65 CPUs and 1 GiB beside 1 H100 (closest: gpu-n1: insufficient_cpu wanted 65 had 64)",
    ),
]


@pytest.mark.parametrize(("nodes", "pending", "expected"), WAITING)
def test_the_summary_if_waiting_may_help(nodes: list[NodeView], pending: Request, expected: str) -> None:
    waiting = _unplaced(nodes, pending)
    assert (waiting.summary, waiting.ever) == (expected, True)


@pytest.mark.parametrize(("nodes", "pending", "expected"), NEVER_PLACEABLE)
def test_the_summary_if_waiting_cannot_help(nodes: list[NodeView], pending: Request, expected: str) -> None:
    waiting = _unplaced(nodes, pending)
    assert (waiting.summary, waiting.ever) == (f"no node could ever host this: {expected}", False)


def test_no_nodes() -> None:
    waiting = _unplaced([], request(1))
    assert (waiting.summary, waiting.ever, waiting.refusals) == ("no nodes have joined yet", False, ())


def test_a_request_may_wait_for_quarantined_gpus() -> None:
    assert _unplaced([node(gpu_views=gpus(H100, 2, quarantined=(0, 1)))], request(2)).ever


def test_the_reason_describes_the_cluster_after_the_cycle() -> None:
    first = request(5, "H100", instance_id="i0")
    plan = schedule(Snapshot((h100s("n1"),), (first, request(4, "H100"))))
    assert plan.unplaced[0].summary == "no node has 4 free H100 (best: 3 on gpu-n1)"


def test_explain_lists_only_nodes_with_refusals_by_id() -> None:
    found = explain([h100s("n3", in_use=8), h100s("n2"), CPU_NODE, _cordoned("n1")], request(1), AT)
    assert [(each.node_id, each.code) for each in found] == [
        ("n1", "node_cordoned"),
        ("n3", "insufficient_gpus"),
        ("n9", "no_gpu"),
    ]


@pytest.mark.parametrize(
    ("nodes", "pending", "expected"),
    [
        ([h100s("n1", 5), h100s("n2", 6)], request(8, "H100"), FittingAlternatives(3, ())),
        ([h100s("n1", 5), node("n2", gpus(A10, 4))], request(4, "H100"), FittingAlternatives(3, (A10,))),
        (
            [h100s("n1", 6), node("n2", gpus([A10, A10, T4, T4, T4]))],
            request(2, "H200"),
            FittingAlternatives(0, (A10, H100, T4)),
        ),
        ([h100s("n1")], request(2, "H100"), FittingAlternatives(8, (H100,))),
        ([h100s("n1", cpu_milli_free=17_000)], request(4, cpu_milli=None), FittingAlternatives(2, ())),
        ([_cordoned("n1")], request(1), FittingAlternatives(0, ())),
        ([h100s("n1")], request(0), FittingAlternatives(0, ())),
        ([], request(1), FittingAlternatives(0, ())),
    ],
)
def test_would_fit(nodes: list[NodeView], pending: Request, expected: FittingAlternatives) -> None:
    assert would_fit(nodes, pending, AT) == expected
