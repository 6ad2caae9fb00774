"""Small clusters: factories for tables of cases, and strategies for property tests."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mooring.core.node import allocatable_memory_mib
from mooring.scheduler.cycle_cache import CycleCache
from mooring.scheduler.model import GpuView, NodeView, Placement, PlanTime, Request
from mooring.scheduler.packing.search import find
from mooring_client.schemas.nodes import NodeState

AT = PlanTime(0.0)  # the time of these clusters, unless a test sets another
H100 = "NVIDIA H100 80GB HBM3"
A10 = "NVIDIA A10"
T4 = "Tesla T4"
V100 = "Tesla V100-SXM2-32GB"
SIZES = {H100: 81_920, A10: 23_028, T4: 15_360, V100: 32_768}

# DGX-1 with V100: the lanes from each GPU to its peers, six in total. Each quad of GPUs is fully linked, and
# each GPU has one peer in the other quad.
CUBE_MESH = (
    {1: 1, 2: 1, 3: 2, 4: 2},
    {0: 1, 2: 2, 3: 1, 5: 2},
    {0: 1, 1: 2, 3: 2, 6: 1},
    {0: 2, 1: 1, 2: 2, 7: 1},
    {0: 2, 5: 1, 6: 1, 7: 2},
    {1: 2, 4: 1, 6: 2, 7: 1},
    {2: 1, 4: 1, 5: 2, 7: 2},
    {3: 1, 4: 2, 5: 1, 6: 2},
)

Lanes = Callable[[int, int], int]  # the number of NVLink lanes between two places


def no_links(_a: int, _b: int) -> int:
    return 0


def pairs(a: int, b: int) -> int:
    """NVLink bridges between 0 and 1, 2 and 3, …, as on PCIe A100s."""
    return 4 if a // 2 == b // 2 else 0


def cube_mesh(a: int, b: int) -> int:
    return CUBE_MESH[a].get(b, 0)


def gpus(
    models: str | list[str],
    count: int = 1,
    *,
    on: str = "n1",
    lanes: Lanes = no_links,
    topology: Callable[[int, int], str | None] = lambda _a, _b: None,
    in_use: tuple[int, ...] = (),
    quarantined: tuple[int, ...] = (),
) -> tuple[GpuView, ...]:
    names = [models] * count if isinstance(models, str) else models
    uuids = [f"GPU-{on}-{place}" for place in range(len(names))]
    peers = [[peer for peer in range(len(names)) if peer != place] for place in range(len(names))]
    return tuple(
        GpuView(
            uuid=uuids[place],
            index=place,
            model=name,
            memory_mib=SIZES[name],
            milli_free=0 if place in in_use else 1000,
            healthy=place not in quarantined,
            nvlink={uuids[peer]: count for peer in peers[place] if (count := lanes(place, peer))},
            topology={uuids[peer]: near for peer in peers[place] if (near := topology(place, peer))},
        )
        for place, name in enumerate(names)
    )


def node(
    node_id: str = "n1",
    gpu_views: tuple[GpuView, ...] = (),
    *,
    state: NodeState = NodeState.READY,
    labels: Mapping[str, str] | None = None,
    cpus: int = 64,
    memory_mib: int = 512 * 1024,
    cpu_milli_free: int | None = None,
    memory_mib_free: int | None = None,
    disk_mib: int | None = None,
) -> NodeView:
    return NodeView(
        id=node_id,
        name=f"gpu-{node_id}",
        state=state,
        labels=labels or {},
        cpu_milli=cpus * 1000,
        memory_mib=memory_mib,
        cpu_milli_free=cpus * 1000 if cpu_milli_free is None else cpu_milli_free,
        memory_mib_free=allocatable_memory_mib(memory_mib) if memory_mib_free is None else memory_mib_free,
        gpus=gpu_views,
        disk_mib=disk_mib,
        disk_mib_free=disk_mib or 0,
    )


def h100s(node_id: str, in_use: int = 0, **changes: Any) -> NodeView:
    """A node of eight H100 behind an NVSwitch, of which the first `in_use` are allocated."""
    gpu_views = gpus(H100, 8, on=node_id, lanes=lambda _a, _b: 18, in_use=tuple(range(in_use)))
    return node(node_id, gpu_views, **changes)


def place_one(nodes: Iterable[NodeView], pending: Request, at: PlanTime) -> Placement | None:
    """The placement of the request if nothing else is pending."""
    cache = CycleCache()
    cache.update(tuple(nodes))
    found = find(cache.cluster, pending, at)
    return found.placement if found else None


def request(count: int = 1, model: str | None = None, **changes: Any) -> Request:
    default = Request(
        instance_id="i1",
        queued_at=0.0,
        gpu_count=count,
        gpu_models=() if model is None else (model,),
        gpu_min_memory_mib=None,
        cpu_milli=1000,
        memory_mib=1024,
        node_selector={},
    )
    return replace(default, **changes)


_ZONES = st.fixed_dictionaries({}, optional={"zone": st.sampled_from("ab")})


@st.composite
def _gpus(draw: st.DrawFn, node_id: str) -> tuple[GpuView, ...]:
    models = draw(st.lists(st.sampled_from([H100, A10, T4]), max_size=6))
    return tuple(
        replace(
            gpu,
            milli_free=draw(st.sampled_from([0, 1000, 1000, 1000])),
            healthy=draw(st.integers(0, 5)) > 0,
        )
        for gpu in gpus(models, on=node_id, lanes=draw(st.sampled_from([no_links, pairs])))
    )


@st.composite
def _node(draw: st.DrawFn, node_id: str) -> NodeView:
    unused = node(
        node_id,
        draw(_gpus(node_id)),
        state=draw(st.sampled_from([NodeState.READY] * 4 + list(NodeState))),
        labels=draw(_ZONES),
        cpus=draw(st.integers(1, 16)),
        memory_mib=draw(st.integers(1024, 65_536)),
    )
    return replace(
        unused,
        cpu_milli_free=draw(st.integers(0, unused.cpu_milli)),
        memory_mib_free=draw(st.integers(0, unused.memory_mib_free)),
    )


@st.composite
def nodes(draw: st.DrawFn, *, at_most: int = 4) -> tuple[NodeView, ...]:
    return tuple(draw(_node(f"n{place}")) for place in range(draw(st.integers(0, at_most))))


@st.composite
def requests(draw: st.DrawFn, *, at_most: int = 12) -> tuple[Request, ...]:
    return tuple(
        Request(
            instance_id=f"i{place}",
            queued_at=float(draw(st.integers(0, 3))),
            gpu_count=draw(st.integers(0, 4)),
            gpu_models=draw(st.sampled_from([(), ("H100",), ("a10",), ("T4",), ("H200",), ("T4", "A10")])),
            gpu_min_memory_mib=draw(st.sampled_from([None, None, 16_384, 40_960])),
            cpu_milli=draw(st.sampled_from([None, 500, 4000])),
            memory_mib=draw(st.sampled_from([None, 512, 8192])),
            node_selector=draw(_ZONES),
        )
        for place in range(draw(st.integers(1, at_most)))
    )
