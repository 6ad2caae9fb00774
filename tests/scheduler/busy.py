"""Strategies for clusters with running, reserved and pending work, and what a plan makes of a cluster.

The latter is computed without code of the scheduler.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from hypothesis import strategies as st

from mooring.core.node import allocatable_memory_mib
from mooring.core.policy import Policy
from mooring.scheduler.model import (
    Gang,
    GpuAllocation,
    GpuView,
    MigView,
    NodeView,
    Placement,
    PlanTime,
    ProjectView,
    Request,
    ReservedPeriod,
    ResourceUsage,
    Running,
    Snapshot,
)
from mooring.scheduler.plan import SchedulingPlan
from mooring_client.schemas.nodes import NodeState
from tests.scheduler.clusters import A10, H100, SIZES

NOW = 1_000_000.0
PROFILE = "1g.10gb"
PROFILE_MILLI = 142
BACKFILLS: st.SearchStrategy[Literal["easy", "conservative"]] = st.sampled_from(["easy", "conservative"])


@st.composite
def _gpu(draw: st.DrawFn, node_id: str, place: int, model: str) -> GpuView:
    uuid = f"GPU-{node_id}-{place}"
    with_mig = model == H100 and draw(st.integers(0, 5)) == 0
    reserved = draw(st.integers(0, 7)) == 0
    begins = draw(st.sampled_from([NOW - 50, NOW + 100, NOW + 1000]))
    return GpuView(
        uuid=uuid,
        index=place,
        model=model,
        memory_mib=SIZES[model],
        healthy=draw(st.integers(0, 7)) > 0,
        compute_capability="9.0" if model == H100 else "8.6",
        numa_node=draw(st.sampled_from([0, 1, None])),
        mig_enabled=with_mig,
        mig=tuple(MigView(f"MIG-{uuid}-{part}", PROFILE, free=True) for part in range(2)) if with_mig else (),
        reserved=(ReservedPeriod("r1", draw(st.sampled_from("ab")), begins, begins + 500),)
        if reserved
        else (),
    )


@st.composite
def _running(draw: st.DrawFn, node: NodeView, number: int) -> Running | None:
    """An instance that fits on the free part of the node; None if none was found."""
    project = draw(st.sampled_from("abc"))
    cpu_milli, memory_mib = draw(st.sampled_from([(500, 512), (2000, 2048)]))
    disk_mib = draw(st.sampled_from([0, 2_000, 20_000]))
    if cpu_milli > node.cpu_milli_free or memory_mib > node.memory_mib_free:
        return None
    if node.disk_mib is not None and disk_mib > node.disk_mib_free:
        return None
    kind = draw(st.sampled_from(["whole", "whole", "share", "mig", "cpu"]))
    allocations = _allocations(node, kind, draw(st.integers(1, 2)), project)
    if allocations is None:
        return None
    stopping = draw(st.integers(0, 5)) == 0
    ends = st.sampled_from([None, NOW + 100, NOW + 700, NOW + 7000])
    return Running(
        instance_id=f"r-{node.id}-{number}",
        project_id=project,
        allocations=allocations,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
        disk_mib=disk_mib,
        priority=draw(st.sampled_from([30, 50])),
        preemptible=draw(st.booleans()),
        since=NOW - draw(st.sampled_from([10, 400, 4000])),
        ends_at=NOW + 20 if stopping else draw(ends),
        stopping=stopping,
        group_id=f"g-{project}" if draw(st.integers(0, 3)) == 0 else None,
    )


def _allocations(node: NodeView, kind: str, count: int, project: str) -> tuple[GpuAllocation, ...] | None:
    plain = [gpu for gpu in node.gpus if not gpu.mig_enabled]
    if kind == "whole":
        free = [gpu for gpu in plain if gpu.milli_free == 1000]
        return tuple(GpuAllocation(gpu.uuid) for gpu in free[:count]) or None
    if kind == "share":
        for gpu in plain:
            if gpu.milli_free >= 250 and gpu.project_id in {None, project}:
                return (GpuAllocation(gpu.uuid, 250),)
        return None
    if kind == "mig":
        for gpu in node.gpus:
            for device in gpu.mig:
                if device.free:
                    return (GpuAllocation(gpu.uuid, PROFILE_MILLI, device.uuid),)
        return None
    return ()


def with_running(node: NodeView, running: Running) -> NodeView:
    """The node with this instance, computed without code of the scheduler."""
    gpus = []
    for gpu in node.gpus:
        allocations = [each for each in running.allocations if each.gpu_uuid == gpu.uuid]
        left = gpu.milli_free - sum(each.milli for each in allocations)
        mig_uuids = {each.mig_uuid for each in allocations}
        devices = tuple(replace(each, free=each.free and each.uuid not in mig_uuids) for each in gpu.mig)
        owner = gpu.project_id or (running.project_id if allocations else None)
        gpus.append(replace(gpu, milli_free=left, mig=devices, project_id=owner))
    return replace(
        node,
        cpu_milli_free=node.cpu_milli_free - running.cpu_milli,
        memory_mib_free=node.memory_mib_free - running.memory_mib,
        disk_mib_free=node.disk_mib_free - running.disk_mib,
        gpus=tuple(gpus),
        running=(*node.running, running),
    )


@st.composite
def busy_node(draw: st.DrawFn, node_id: str) -> NodeView:
    models = draw(st.lists(st.sampled_from([H100, H100, A10]), max_size=4))
    cpus, memory = draw(st.integers(2, 16)), draw(st.integers(4096, 32_768))
    disk = draw(st.sampled_from([None, 30_000, 400_000]))
    labels = {"zone": draw(st.sampled_from("ab"))} | ({"fabric": "f1"} if draw(st.booleans()) else {})
    node = NodeView(
        id=node_id,
        name=f"gpu-{node_id}",
        state=draw(st.sampled_from([NodeState.READY] * 7 + [NodeState.CORDONED])),
        labels=labels,
        cpu_milli=cpus * 1000,
        memory_mib=memory,
        cpu_milli_free=cpus * 1000,
        memory_mib_free=allocatable_memory_mib(memory),
        gpus=tuple(draw(_gpu(node_id, place, model)) for place, model in enumerate(models)),
        swarm=draw(st.sampled_from([None, "s1", "s1", "s2"])),
        disk_mib=disk,
        disk_mib_free=disk or 0,
        disk_enforced=draw(st.booleans()),
        disk_pressure=draw(st.integers(0, 7)) == 0,
    )
    for number in range(draw(st.integers(0, 4))):
        if running := draw(_running(node, number)):
            node = with_running(node, running)
    return node


@st.composite
def request(draw: st.DrawFn, instance_id: str) -> Request:
    kind = draw(st.sampled_from(["whole", "whole", "whole", "share", "mig", "cpu"]))
    count = {"cpu": 0, "share": 1}.get(kind, draw(st.integers(1, 3)))
    return Request(
        instance_id=instance_id,
        queued_at=NOW - draw(st.sampled_from([1, 5, 100, 100_000])),
        gpu_count=count,
        gpu_models=draw(st.sampled_from([(), (), ("H100",), ("A10", "H100")])) if count else (),
        gpu_min_memory_mib=draw(st.sampled_from([None, None, None, 40_960])) if kind == "whole" else None,
        cpu_milli=draw(st.sampled_from([None, 500, 1000])),
        memory_mib=draw(st.sampled_from([None, 512])),
        disk_mib=draw(st.sampled_from([None, None, 1_000, 25_000])),
        disk_limits=draw(st.integers(0, 4)) == 0,
        node_selector=draw(st.sampled_from([{}, {}, {"zone": "a"}])),
        project_id=draw(st.sampled_from("abc")),
        gpu_milli={"share": draw(st.sampled_from([250, 500])), "mig": PROFILE_MILLI}.get(kind, 1000),
        mig_profile=PROFILE if kind == "mig" else None,
        gpu_min_compute_capability=draw(st.sampled_from([None, None, None, "9.0"])) if count else None,
        same_numa=draw(st.integers(0, 3)) == 0,
        priority=draw(st.sampled_from([30, 50, 70])),
        preemptible=draw(st.booleans()),
        max_duration_s=draw(st.sampled_from([None, 50, 600, 6000])),
    )


@st.composite
def requests(draw: st.DrawFn, *, at_most: int = 8) -> tuple[Request, ...]:
    alone = [draw(request(f"i{number}")) for number in range(draw(st.integers(1, at_most)))]
    return (*alone, *(draw(_gang()) if draw(st.integers(0, 2)) == 0 else ()))


@st.composite
def _gang(draw: st.DrawFn) -> tuple[Request, ...]:
    size = draw(st.integers(2, 3))
    network: Literal["overlay", "host"] = draw(st.sampled_from(["overlay", "host"]))
    first = replace(draw(request("g0")), same_numa=False)
    all_equal = draw(st.booleans())  # otherwise the first may request fewer GPUs
    return tuple(
        replace(
            first,
            instance_id=f"g{number}",
            gpu_count=first.gpu_count if all_equal or number else min(first.gpu_count, 1),
            gang=Gang("gang", size, network),
        )
        for number in range(size)
    )


@st.composite
def snapshots(draw: st.DrawFn, *, nodes_at_most: int = 4, requests_at_most: int = 8) -> Snapshot:
    nodes = tuple(draw(busy_node(f"n{place}")) for place in range(draw(st.integers(0, nodes_at_most))))
    projects = {
        project: ProjectView(
            weight=draw(st.sampled_from([1.0, 2.0])),
            used=ResourceUsage(draw(st.sampled_from([0.0, 1e6])), 0.0, 0.0),
            guaranteed_gpu_milli=draw(st.sampled_from([None, None, 2000])),
        )
        for project in draw(st.sampled_from(["", "ab", "abc"]))
    }
    policy = Policy(backfill=draw(BACKFILLS))
    return Snapshot(nodes, draw(requests(at_most=requests_at_most)), {}, projects, NOW, policy)


# ---- the cluster after a plan


@dataclass(frozen=True)
class After:
    """The cluster after the placements of a plan, computed without code of the scheduler."""

    nodes: dict[str, NodeView]
    requests: dict[str, Request]  # pending before the plan


def time_after_evictions(snapshot: Snapshot) -> PlanTime:
    """The time at which the victims of a preemption are expected to have stopped."""
    return replace(snapshot.at, now=snapshot.now + snapshot.policy.start_overhead_s)


def after(snapshot: Snapshot, plan: SchedulingPlan, *, evicted: bool = False) -> After:
    """The cluster with the placements of the plan.

    Args:
        evicted: also without the victims of its evictions.
    """
    requests = {each.instance_id: each for each in snapshot.requests}
    nodes = {node.id: node for node in snapshot.nodes}
    gone = {eviction.instance_id for eviction in plan.evictions} if evicted else set()
    for node in snapshot.nodes:
        if any(running.instance_id in gone for running in node.running):
            nodes[node.id] = rebuilt(node, [each for each in node.running if each.instance_id not in gone])
    for placed in plan.placements:
        nodes[placed.node_id] = with_running(
            nodes[placed.node_id], as_running(placed, requests[placed.instance_id], snapshot.now)
        )
    return After(nodes, requests)


def as_running(placed: Placement, request: Request, now: float) -> Running:
    return Running(
        placed.instance_id,
        request.project_id,
        placed.allocations,
        placed.cpu_milli,
        placed.memory_mib,
        request.priority,
        request.preemptible,
        now,
        None if request.max_duration_s is None else now + request.max_duration_s,
        group_id=request.gang.group_id if request.gang else None,
        disk_mib=placed.disk_mib,
    )


def rebuilt(node: NodeView, running: list[Running]) -> NodeView:
    """The node with only these instances."""
    node = replace(
        node,
        cpu_milli_free=node.cpu_milli,
        memory_mib_free=allocatable_memory_mib(node.memory_mib),
        disk_mib_free=node.disk_mib or 0,
        gpus=tuple(
            replace(
                gpu,
                milli_free=1000,
                project_id=None,
                mig=tuple(replace(device, free=True) for device in gpu.mig),
            )
            for gpu in node.gpus
        ),
        running=(),
    )
    for each in running:
        node = with_running(node, each)
    return node


def breaches(node: NodeView, snapshot: Snapshot, requests: dict[str, Request]) -> list[str]:
    """A phrase for each rule that the node breaks after a plan.

    Args:
        requests: by instance id. What ran before the plan may break some rules.
    """
    found = []
    if node.cpu_milli_free < 0 or node.memory_mib_free < 0:
        found.append("over capacity")
    if node.disk_mib is not None and node.disk_mib_free < 0:
        found.append("over its disk")
    for running in node.running:
        if request := requests.get(running.instance_id):
            unenforced = request.disk_limits and not node.disk_enforced
            unreported = node.disk_mib is None and request.disk_mib is not None
            if node.disk_pressure or unenforced or unreported:
                found.append("no disk")
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    milli: Counter[str] = Counter()
    owners: dict[str, set[str]] = defaultdict(set)
    devices: Counter[str] = Counter()
    for running in node.running:
        for allocation in running.allocations:
            gpu = gpus[allocation.gpu_uuid]
            if (allocation.mig_uuid is not None) != gpu.mig_enabled:
                found.append("a GPU and its MIG devices")
            if allocation.mig_uuid is not None:
                devices[allocation.mig_uuid] += 1
            else:
                milli[gpu.uuid] += allocation.milli
                owners[gpu.uuid].add(running.project_id)
            if running.instance_id in requests and _reserved_for_others(gpu, running, snapshot):
                found.append("reserved for others")
            if running.instance_id in requests and not gpu.healthy:
                found.append("quarantined")
    found += ["more than a GPU"] * sum(amount > 1000 for amount in milli.values())
    found += ["a MIG device twice"] * sum(count > 1 for count in devices.values())
    found += ["two projects on a GPU"] * sum(len(projects) > 1 for projects in owners.values())
    return found


def _reserved_for_others(gpu: GpuView, running: Running, snapshot: Snapshot) -> bool:
    overhead = snapshot.policy.start_overhead_s
    ends = inf if running.ends_at is None else running.ends_at + overhead
    return any(
        period.project_id != running.project_id and period.from_at < ends and period.to_at > snapshot.now
        for period in gpu.reserved
    )
