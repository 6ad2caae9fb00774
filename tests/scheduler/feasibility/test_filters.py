"""The refusals of each rule."""

from dataclasses import replace
from typing import Any

import pytest

from mooring.scheduler.feasibility.filters import fits, refusals
from mooring.scheduler.feasibility.needs import needs
from mooring.scheduler.model import MigView, NodeView, Request, ReservedPeriod
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.clusters import A10, AT, H100, T4, gpus, h100s, node, request

FULL = gpus(H100, 8, in_use=(0, 1, 2, 3, 4, 5), quarantined=(6,))

ONE = gpus(H100)
SHARED = (replace(ONE[0], milli_free=400, project_id="p"),)
MIG = (
    replace(
        ONE[0],
        mig_enabled=True,
        mig=(MigView("MIG-a", "1g.10gb", free=False), MigView("MIG-b", "3g.40gb", free=True)),
    ),
)
RESERVED_FOR_OTHER = (replace(ONE[0], reserved=(ReservedPeriod("r1", "other", 100.0, 200.0),)),)
NUMA = tuple(replace(gpu, numa_node=gpu.index // 2) for gpu in gpus(H100, 4, in_use=(0, 2)))

REFUSED: list[tuple[NodeView, Request, list[tuple[str, str, str]]]] = [
    (node(state=NodeState.CORDONED), request(0), [("node_cordoned", "ready", "cordoned")]),
    (node(state=NodeState.DRAINING), request(0), [("node_draining", "ready", "draining")]),
    (node(state=NodeState.NOT_READY), request(0), [("node_not_ready", "ready", "not_ready")]),
    (node(state=NodeState.UNREACHABLE), request(0), [("node_unreachable", "ready", "unreachable")]),
    (
        node(labels={"zone": "b"}),
        request(0, node_selector={"zone": "a", "disk": "nvme"}),
        [("selector_mismatch", "disk=nvme", "no label disk"), ("selector_mismatch", "zone=a", "zone=b")],
    ),
    (node(cpu_milli_free=500), request(0), [("insufficient_cpu", "1", "0.5")]),
    (
        node(memory_mib_free=65_000),
        request(0, memory_mib=65_536),
        [("insufficient_memory", "64 GiB", "65000 MiB")],
    ),
    (node(), request(2), [("no_gpu", "2 free GPUs of one model", "no GPU")]),
    (
        node(gpu_views=gpus([T4, A10, A10])),
        request(1, "H100"),
        [("gpu_model_mismatch", "H100", "NVIDIA A10, Tesla T4")],
    ),
    (node(gpu_views=gpus(H100)), request(1, "A10"), [("gpu_model_mismatch", "A10", H100)]),
    (
        node(gpu_views=gpus([T4, A10])),
        request(1, gpu_min_memory_mib=40_960),
        [("insufficient_gpu_memory", "40 GiB", "23028 MiB")],
    ),
    (
        node(gpu_views=FULL),
        request(2, "H100"),
        [("insufficient_gpus", "2 free H100", "1 free of 8 (6 in use, 1 quarantined)")],
    ),
    (
        node(gpu_views=gpus(T4)),
        request(2),
        [("insufficient_gpus", "2 free GPUs of one model", "1 free of 1")],
    ),
    (
        node(gpu_views=gpus([T4, A10])),
        request(2),
        [("insufficient_gpus", "2 free GPUs of one model", "1 free of 1 NVIDIA A10")],
    ),
    (
        node(gpu_views=gpus([T4, A10], in_use=(1,))),
        request(1, gpu_min_memory_mib=20_480),
        [("insufficient_gpus", "1 free GPU of at least 20 GiB", "0 free of 1 (1 in use)")],
    ),
    (
        node(gpu_views=gpus([T4, A10])),
        request(1, gpu_models=("H100", "A100")),
        [("gpu_model_mismatch", "H100 or A100", "NVIDIA A10, Tesla T4")],
    ),
    (
        node(gpu_views=(replace(ONE[0], compute_capability="8.9"),)),
        request(1, gpu_min_compute_capability="9.0"),
        [("insufficient_compute_capability", "9.0", "8.9")],
    ),
    (
        node(gpu_views=ONE),
        request(1, gpu_min_compute_capability="9.0"),
        [("insufficient_compute_capability", "9.0", "unknown")],
    ),
    (
        node(gpu_views=SHARED),
        request(1, gpu_milli=500, project_id="p"),
        [("insufficient_gpu_share", "0.5 free of one GPU", "at most 0.4 of one (1 in use)")],
    ),
    (
        node(gpu_views=SHARED),
        request(1, gpu_milli=250, project_id="q"),
        [
            (
                "gpu_shared_by_other_project",
                "0.25 free of one GPU",
                "at most 0 of one (1 shared by another project)",
            )
        ],
    ),
    (node(gpu_views=SHARED), request(1), [("insufficient_gpus", "1 free GPU", "0 free of 1 (1 in use)")]),
    (
        node(gpu_views=MIG),
        request(1),
        [("gpu_has_mig_enabled", "a GPU without MIG", "MIG is enabled on all of them")],
    ),
    (
        node(gpu_views=MIG),
        request(1, mig_profile="2g.20gb", gpu_milli=285),
        [("no_such_mig_profile", "2g.20gb", "1g.10gb, 3g.40gb")],
    ),
    (
        node(gpu_views=ONE),
        request(1, mig_profile="1g.10gb", gpu_milli=142),
        [("no_such_mig_profile", "1g.10gb", "no MIG devices")],
    ),
    (
        node(gpu_views=MIG),
        request(1, mig_profile="1g.10gb", gpu_milli=142),
        [("insufficient_mig_devices", "1 free 1g.10gb", "0 free of 1 (1 in use)")],
    ),
    (
        node(gpu_views=MIG),
        request(1, mig_profile="3g.40gb", gpu_milli=428, gpu_min_memory_mib=65_536),
        [("insufficient_gpu_memory", "64 GiB", "40 GiB")],
    ),
    (
        node(gpu_views=RESERVED_FOR_OTHER),
        request(1),
        [("gpu_reserved", "1 free GPU", "0 free of 1 (1 reserved)")],
    ),
    (
        node(gpu_views=RESERVED_FOR_OTHER),
        request(1, max_duration_s=71),
        [("gpu_reserved", "1 free GPU", "0 free of 1 (1 reserved)")],
    ),
    (
        node(gpu_views=NUMA),
        request(2, same_numa=True),
        [
            (
                "gpus_not_on_one_numa_node",
                "2 free GPUs of one model on one NUMA node",
                "2 free of 4 (2 in use)",
            )
        ],
    ),
]


@pytest.mark.parametrize(("where", "pending", "expected"), REFUSED)
def test_refused(where: NodeView, pending: Request, expected: list[tuple[str, str, str]]) -> None:
    found = list(refusals(where, pending, AT))
    assert [(each.code, each.wanted, each.had) for each in found] == expected
    assert {(each.node_id, each.node_name) for each in found} == {("n1", "gpu-n1")}


def test_all_refusals_of_a_node_are_listed() -> None:
    where = node(gpu_views=FULL, state=NodeState.DRAINING, cpu_milli_free=0, memory_mib_free=0)
    pending = request(2, "H100", node_selector={"zone": "a"})
    assert [each.code for each in refusals(where, pending, AT)] == [
        "node_draining",
        "selector_mismatch",
        "insufficient_cpu",
        "insufficient_memory",
        "insufficient_gpus",
    ]


@pytest.mark.parametrize(
    ("where", "pending"),
    [
        (node(cpus=1, memory_mib=1536), request(0)),  # 1536 MiB, of which 512 are reserved for the system
        (node(gpu_views=gpus(T4, 2), labels={"zone": "a"}), request(2, node_selector={"zone": "a"})),
        (node(gpu_views=gpus([T4, A10])), request(1, "a10", gpu_min_memory_mib=23_028)),
        (node(gpu_views=FULL), request(1, "h100")),
        (h100s("n1"), request(8, "H100", cpu_milli=64_000)),
        (node(gpu_views=SHARED), request(1, gpu_milli=400, project_id="p")),
        (node(gpu_views=MIG), request(1, mig_profile="3g.40gb", gpu_milli=428, gpu_min_memory_mib=40_960)),
        (node(gpu_views=RESERVED_FOR_OTHER), request(1, max_duration_s=70)),  # and 30 s of overhead
        (node(gpu_views=RESERVED_FOR_OTHER), request(1, project_id="other")),
        (node(gpu_views=NUMA), request(2)),
        (node(gpu_views=gpus(H100, 4)), request(1, same_numa=True)),
        (
            node(gpu_views=(replace(ONE[0], compute_capability="10.0"),)),
            request(1, gpu_min_compute_capability="9.0"),
        ),
    ],
)
def test_just_fits(where: NodeView, pending: Request) -> None:
    assert fits(where, pending, AT)


@pytest.mark.parametrize(
    ("where", "changes", "expected"),
    [
        (h100s("n1"), {"count": 2}, (16_000, (524_288 - 10_485) // 4)),
        (h100s("n1"), {"count": 2, "cpu_milli": 500}, (500, (524_288 - 10_485) // 4)),
        (h100s("n1"), {"count": 2, "memory_mib": 64}, (16_000, 64)),
        (h100s("n1"), {"count": 1, "gpu_milli": 250}, (2000, (524_288 - 10_485) * 250 // 8000)),
        (h100s("n1"), {"count": 16}, (64_000, 524_288 - 10_485)),  # no more than the node
        (node(), {"count": 2}, (0, 0)),
        (node(gpu_views=gpus(H100, 3), cpus=1), {"count": 1}, (333, (524_288 - 10_485) // 3)),
        (h100s("n1"), {"count": 0}, (1000, 1024)),
        (node(), {"count": 0, "cpu_milli": 250, "memory_mib": 6}, (250, 6)),
    ],
)
def test_needs(where: NodeView, changes: dict[str, Any], expected: tuple[int, int]) -> None:
    assert needs(request(**{"cpu_milli": None, "memory_mib": None} | changes), where) == expected
