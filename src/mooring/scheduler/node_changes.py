"""Copies of a node with instances added or removed. Nodes are immutable."""

from collections.abc import Iterable
from dataclasses import replace

from mooring.core.node import allocatable_memory_mib
from mooring.scheduler.model import GpuAllocation, GpuView, NodeView, Placement, PlanTime, Request, Running
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI


def with_placement(node: NodeView, placed: Placement, request: Request, at: PlanTime) -> NodeView:
    return added(node, Running.of(placed, request, at))


def added(node: NodeView, running: Running) -> NodeView:
    return replace(
        node,
        cpu_milli_free=node.cpu_milli_free - running.cpu_milli,
        memory_mib_free=node.memory_mib_free - running.memory_mib,
        disk_mib_free=node.disk_mib_free - running.disk_mib,
        gpus=_changed(node.gpus, running.allocations, running.project_id, -1),
        running=(*node.running, running),
    )


def without(node: NodeView, gone: Iterable[Running]) -> NodeView:
    ended = {running.instance_id: running for running in gone}
    if not ended:
        return node
    gpus = node.gpus
    for running in ended.values():
        gpus = _changed(gpus, running.allocations, running.project_id, +1)
    return replace(
        node,
        cpu_milli_free=node.cpu_milli_free + sum(running.cpu_milli for running in ended.values()),
        memory_mib_free=node.memory_mib_free + sum(running.memory_mib for running in ended.values()),
        disk_mib_free=node.disk_mib_free + sum(running.disk_mib for running in ended.values()),
        gpus=gpus,
        running=tuple(running for running in node.running if running.instance_id not in ended),
    )


def empty(node: NodeView) -> NodeView:
    """The node as if it were ready, without instances or disk pressure, its GPUs healthy and unreserved."""
    return replace(
        node,
        state=NodeState.READY,
        cpu_milli_free=node.cpu_milli,
        memory_mib_free=allocatable_memory_mib(node.memory_mib),
        disk_mib_free=node.disk_mib or 0,
        disk_pressure=False,
        gpus=tuple(map(_emptied_gpu, node.gpus)),
        running=(),
    )


def _emptied_gpu(gpu: GpuView) -> GpuView:
    devices = tuple(replace(device, free=True) for device in gpu.mig)
    return replace(gpu, milli_free=WHOLE_MILLI, project_id=None, healthy=True, mig=devices, reserved=())


def _changed(
    gpus: tuple[GpuView, ...], allocations: Iterable[GpuAllocation], project_id: str, sign: int
) -> tuple[GpuView, ...]:
    """The GPUs after these allocations are made (sign -1) or released (+1)."""
    by_gpu: dict[str, list[GpuAllocation]] = {}
    for allocation in allocations:
        by_gpu.setdefault(allocation.gpu_uuid, []).append(allocation)
    return tuple(
        _changed_gpu(gpu, by_gpu[gpu.uuid], project_id, sign) if gpu.uuid in by_gpu else gpu for gpu in gpus
    )


def _changed_gpu(gpu: GpuView, allocations: list[GpuAllocation], project_id: str, sign: int) -> GpuView:
    free = gpu.milli_free + sign * sum(allocation.milli for allocation in allocations)
    owner = None if free == WHOLE_MILLI else gpu.project_id or project_id
    if not gpu.mig:
        return replace(gpu, milli_free=free, project_id=owner)
    mig_uuids = {allocation.mig_uuid for allocation in allocations}
    mig = (replace(device, free=sign > 0) if device.uuid in mig_uuids else device for device in gpu.mig)
    return replace(gpu, milli_free=free, project_id=owner, mig=tuple(mig))
