"""Checks placements against locked rows: free GPUs, CPUs, memory, disk and quotas. Overrides every plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from mooring.control.instances import durations, placement_rules
from mooring.control.scheduling import requests, reserved_gpus
from mooring.control.volumes.mounts import VolumeGuard
from mooring.core.instance.state import HOLDS_GPUS
from mooring.core.node import allocatable_memory_mib, state_of
from mooring.db.tables import Allocation, Gpu, Instance, Project
from mooring.db.types import JsonObject, now
from mooring.scheduler.feasibility import quotas as rules
from mooring.scheduler.model import GpuAllocation, Placement, Quota, Request, ReservedPeriod
from mooring_client.schemas.gpus import Health
from mooring_client.schemas.nodes import NodeState
from mooring_client.schemas.spec import WHOLE_MILLI


@dataclass(frozen=True, slots=True)
class Used:
    """CPUs, memory and disk of the instances placed on a node."""

    cpu_milli: int = 0
    memory_mib: int = 0
    disk_mib: int = 0

    def with_(self, placement: Placement) -> "Used":
        return Used(
            self.cpu_milli + placement.cpu_milli,
            self.memory_mib + placement.memory_mib,
            self.disk_mib + placement.disk_mib,
        )


def used_by_node(session: Session, node_ids: Iterable[str]) -> dict[str, Used]:
    sums = (func.sum(Instance.cpu_milli), func.sum(Instance.memory_mib), func.sum(Instance.disk_mib))
    query = (
        select(Instance.node_id, *sums)
        .where(Instance.state.in_(HOLDS_GPUS), Instance.deleted_at.is_(None))
        .where(Instance.node_id.in_(set(node_ids)))
        .group_by(Instance.node_id)
    )
    return {
        node_id: Used(int(cpus or 0), int(memory or 0), int(disk or 0))
        for node_id, cpus, memory, disk in session.execute(query)
        if node_id
    }


@dataclass(frozen=True, slots=True)
class LockedGpu:
    """A healthy GPU and what is allocated of it."""

    node_id: str
    model: str
    milli_held: int
    held_by: str | None
    mig_free: frozenset[str] | None  # the free MIG devices; null: MIG is not enabled
    reserved: Sequence[ReservedPeriod] = ()

    def allocated(self, allocation: GpuAllocation, project_id: str, until: float) -> "LockedGpu | None":
        """The GPU after an allocation to the project, from now to `until`; null if that is not possible."""
        if any(period.project_id != project_id and period.from_at < until for period in self.reserved):
            return None
        held = self.milli_held + allocation.milli
        if held > WHOLE_MILLI or (allocation.mig_uuid is None) != (self.mig_free is None):
            return None
        if self.mig_free is not None and allocation.mig_uuid is not None:
            left = self.mig_free - {allocation.mig_uuid}
            return replace(self, milli_held=held, mig_free=left) if left != self.mig_free else None
        if self.milli_held and self.held_by != project_id:
            return None  # one project has all shares of a GPU (R12)
        return replace(self, milli_held=held, held_by=project_id)


class DiskGuard:
    """Checks the disk of a placement: its size, and disk limits of the node if the project requires them."""

    def __init__(self, session: Session, placements: Sequence[Placement]) -> None:
        # Read again: the plan is older than this transaction.
        query = (
            select(Instance.id, Instance.spec["disk_mib"].as_integer(), Project.require_disk_limits)
            .join(Project, Project.id == Instance.project_id)
            .where(Instance.id.in_({placement.instance_id for placement in placements}))
        )
        self._requested = {key: (disk_mib, limits) for key, disk_mib, limits in session.execute(query)}

    def fits(self, facts: Mapping[str, Any], placement: Placement, after_mib: int) -> bool:
        """Args: after_mib: the disk of all instances of the node, including the placed one."""
        requested_mib, limits = self._requested[placement.instance_id]
        disk = facts.get("disk")
        if disk is None:
            return requested_mib is None and not limits
        if disk["pressure"] or (limits and not disk["enforced"]):
            return False
        return placement.disk_mib >= (requested_mib or 0) and after_mib <= disk["allocatable_mib"]


class Guard:
    """Checks placements against the free resources and quotas of locked rows, and counts the accepted ones.

    Args:
        nodes: locked, by id, with `deleted_at`, the flags and the facts.
        limited: the quotas of the locked projects, by project id.
    """

    def __init__(
        self,
        session: Session,
        placements: Sequence[Placement],
        nodes: Mapping[str, Row[Any]],
        limited: Mapping[str, Quota],
    ) -> None:
        self._nodes = nodes
        self._quotas = dict(limited)
        self._now = now()
        self._gpus = _gpus(session, placements)
        self._used = used_by_node(session, nodes)
        self._requests = _requests(session, placements, limited)
        self._selectors = placement_rules.selectors(session)
        self._disk = DiskGuard(session, placements)
        self.volumes = VolumeGuard(session, placements)

    def takes(self, unit: Sequence[tuple[Placement, Row[Any]]]) -> bool:
        """Whether all placements of the unit fit together; if so, they are counted.

        Args:
            unit: placements, each with its instance's columns.
        """
        if len(unit) == 1:
            return self._takes(*unit[0])
        before = dict(self._quotas), dict(self._gpus), dict(self._used)
        if all(self._takes(placement, row) for placement, row in unit):
            return True
        self._quotas, self._gpus, self._used = before
        return False

    def _takes(self, placement: Placement, row: Row[Any]) -> bool:
        node = self._nodes.get(placement.node_id)
        if node is None or not _is_ready(node):
            return False
        if not placement_rules.admits(node, row.project_id, self._selectors.get(row.project_id, {})):
            return False
        gpus = self._gpus_after(placement, row)
        if gpus is None or not self._fits(node, placement) or not self.volumes.fits(placement, node.facts):
            return False
        if not self._within_quota(placement, row):
            return False
        self.volumes.take(placement)
        self._gpus.update(gpus)
        self._used[node.id] = self._used.get(node.id, Used()).with_(placement)
        return True

    def _gpus_after(self, placement: Placement, row: Row[Any]) -> dict[str, LockedGpu] | None:
        """The GPUs after the placement; null if one of them cannot be allocated."""
        until = durations.end_s(row, self._now)
        after: dict[str, LockedGpu] = {}
        for allocation in placement.allocations:
            gpu = after.get(allocation.gpu_uuid) or self._gpus.get(allocation.gpu_uuid)
            if gpu is None or gpu.node_id != placement.node_id:
                return None
            allocated = gpu.allocated(allocation, row.project_id, until)
            if allocated is None:
                return None
            after[allocation.gpu_uuid] = allocated
        return after

    def _fits(self, node: Row[Any], placement: Placement) -> bool:
        after = self._used.get(node.id, Used()).with_(placement)
        cpus = after.cpu_milli <= node.facts["cpus"] * 1000
        memory = after.memory_mib <= allocatable_memory_mib(node.facts["memory_mib"])
        return cpus and memory and self._disk.fits(node.facts, placement, after.disk_mib)

    def _within_quota(self, placement: Placement, row: Row[Any]) -> bool:
        """Whether the placement stays within the project's quota; if so, it is counted."""
        quota = self._quotas.get(row.project_id)
        if quota is None:
            return True
        request = replace(self._requests[row.id], quota=quota)
        model = self._gpus[placement.allocations[0].gpu_uuid].model if placement.allocations else ""
        allocated = (model, placement.cpu_milli, placement.memory_mib)
        if rules.over(request, *allocated):
            return False
        self._quotas[row.project_id] = rules.after(quota, request, *allocated)
        return True


def _requests(
    session: Session, placements: Sequence[Placement], limited: Mapping[str, Quota]
) -> dict[str, Request]:
    """The requests of placed instances whose projects have quotas, by instance id."""
    if not limited:
        return {}
    ids = {placement.instance_id for placement in placements}
    query = select(Instance.id, Instance.project_id, Instance.spec)
    query = query.where(Instance.id.in_(ids), Instance.project_id.in_(limited))
    return {
        instance_id: requests.of_columns(instance_id, project_id, 0, spec)
        for instance_id, project_id, spec in session.execute(query)
    }


def _is_ready(node: Row[Any]) -> bool:
    if node.deleted_at is not None or node.facts is None:
        return False
    state = state_of(
        silent=node.silent,
        problem=node.problem is not None,
        draining=node.draining,
        cordoned=node.cordoned,
    )
    return state is NodeState.READY


def _gpus(session: Session, placements: Sequence[Placement]) -> dict[str, LockedGpu]:
    uuids = {allocation.gpu_uuid for placement in placements for allocation in placement.allocations}
    if not uuids:
        return {}
    query = select(Allocation.mig_uuid).where(Allocation.to_at.is_(None), Allocation.mig_uuid.is_not(None))
    allocated_mig = frozenset(filter(None, session.scalars(query.where(Allocation.gpu_uuid.in_(uuids)))))
    mig_mode = Gpu.facts["mig_mode"].as_string()
    columns = (Gpu.uuid, Gpu.node_id, Gpu.model, Gpu.milli_held, Gpu.held_by, mig_mode)
    healthy = select(*columns).where(Gpu.uuid.in_(uuids), Gpu.health == Health.HEALTHY)
    found = session.execute(healthy).all()
    devices = _mig_devices(session, [uuid for uuid, *_rest, mode in found if mode == "enabled"])
    reserved = reserved_gpus.by_gpu(session)
    return {
        uuid: LockedGpu(
            node_id=node_id,
            model=model,
            milli_held=held,
            held_by=held_by,
            mig_free=devices[uuid] - allocated_mig if mode == "enabled" else None,
            reserved=reserved.get(uuid, ()),
        )
        for uuid, node_id, model, held, held_by, mode in found
    }


def _mig_devices(session: Session, uuids: Sequence[str]) -> dict[str, frozenset[str]]:
    if not uuids:
        return {}
    query = select(Gpu.uuid, Gpu.facts).where(Gpu.uuid.in_(uuids))
    return {uuid: _uuids(facts) for uuid, facts in session.execute(query)}


def _uuids(facts: JsonObject) -> frozenset[str]:
    return frozenset(device["uuid"] for device in facts.get("mig_devices", ()))
