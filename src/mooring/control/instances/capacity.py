"""What nodes, cards and projects have left as the locked rows tell it: the authority over every plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from mooring.control.instances import placement_rules
from mooring.control.instances.disk_guard import DiskGuard
from mooring.control.scheduling import requests, reserved_gpus
from mooring.core.gpu import Health
from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.instance.state import HOLDS_GPUS
from mooring.core.node import NodeState, allocatable_memory_mib, state_of
from mooring.db.tables import Allocation, Gpu, Instance
from mooring.db.types import JsonObject, now
from mooring.scheduler.feasibility import quotas as rules
from mooring.scheduler.model import GpuAllocation, Placement, Quota, Request, ReservedPeriod


@dataclass(frozen=True, slots=True)
class Used:
    """CPUs, memory and disk that a node's placed instances were given."""

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
    """A healthy card and what is given out of it."""

    node_id: str
    model: str
    milli_held: int
    held_by: str | None
    mig_free: frozenset[str] | None  # the MIG devices that are not given out; null: MIG is not enabled
    holds: Sequence[ReservedPeriod] = ()

    def giving(self, grant: GpuAllocation, project_id: str, until: float) -> "LockedGpu | None":
        """The card once this is given to the project until then; null if it cannot be."""
        if any(hold.project_id != project_id and hold.from_at < until for hold in self.holds):
            return None
        held = self.milli_held + grant.milli
        if held > WHOLE_MILLI or (grant.mig_uuid is None) != (self.mig_free is None):
            return None
        if self.mig_free is not None and grant.mig_uuid is not None:
            left = self.mig_free - {grant.mig_uuid}
            return replace(self, milli_held=held, mig_free=left) if left != self.mig_free else None
        if self.milli_held and self.held_by != project_id:
            return None  # shares of one card are all of one project (R12)
        return replace(self, milli_held=held, held_by=project_id)


class Guard:
    """What the locked nodes and projects have left, and less with every unit that it lets through.

    Args:
        nodes: by id, locked, with `deleted_at`, the flags and the facts.
        limited: the quotas of the locked projects.
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
        self._now = now().timestamp()
        self._cards = _cards(session, placements)
        self._used = used_by_node(session, nodes)
        self._requests = _requests(session, placements, limited)
        self._selectors = placement_rules.selectors(session)
        self._disk = DiskGuard(session, placements)

    def takes(self, unit: Sequence[tuple[Placement, Row[Any]]]) -> bool:
        """Whether there is room for all of these together, which is then counted; else nothing is.

        Args:
            unit: placements, each with its instance's columns.
        """
        before = dict(self._quotas), dict(self._cards), dict(self._used) if len(unit) > 1 else {}
        if all(self._takes(placement, row) for placement, row in unit):
            return True
        if len(unit) > 1:
            self._quotas, self._cards, self._used = before
        return False

    def _takes(self, placement: Placement, row: Row[Any]) -> bool:
        node = self._nodes.get(placement.node_id)
        if node is None or not _is_ready(node):
            return False
        if not placement_rules.admits(node, row.project_id, self._selectors.get(row.project_id, {})):
            return False
        cards = self._with(placement, row)
        if cards is None or not self._fits(node, placement) or not self._within_quota(placement, row):
            return False
        self._cards.update(cards)
        self._used[node.id] = self._used.get(node.id, Used()).with_(placement)
        return True

    def _with(self, placement: Placement, row: Row[Any]) -> dict[str, LockedGpu] | None:
        """The cards after the placement; null where one of them cannot be given."""
        until = inf if row.max_duration_s is None else self._now + row.max_duration_s
        after: dict[str, LockedGpu] = {}
        for grant in placement.grants:
            card = after.get(grant.gpu_uuid) or self._cards.get(grant.gpu_uuid)
            there = card is not None and card.node_id == placement.node_id
            given = card.giving(grant, row.project_id, until) if card and there else None
            if given is None:
                return None
            after[grant.gpu_uuid] = given
        return after

    def _fits(self, node: Row[Any], placement: Placement) -> bool:
        after = self._used.get(node.id, Used()).with_(placement)
        cpus = after.cpu_milli <= node.facts["cpus"] * 1000
        memory = after.memory_mib <= allocatable_memory_mib(node.facts["memory_mib"])
        return cpus and memory and self._disk.fits(node.facts, placement, after.disk_mib)

    def _within_quota(self, placement: Placement, row: Row[Any]) -> bool:
        """Whether the project may be given it, which is then counted."""
        quota = self._quotas.get(row.project_id)
        if quota is None:
            return True
        request = replace(self._requests[row.id], quota=quota)
        model = self._cards[placement.grants[0].gpu_uuid].model if placement.grants else ""
        given = (model, placement.cpu_milli, placement.memory_mib)
        if rules.over(request, *given):
            return False
        self._quotas[row.project_id] = rules.after(quota, request, *given)
        return True


def _requests(
    session: Session, placements: Sequence[Placement], limited: Mapping[str, Quota]
) -> dict[str, Request]:
    """Of the projects with limits: what the placed instances asked for."""
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


def _cards(session: Session, placements: Sequence[Placement]) -> dict[str, LockedGpu]:
    uuids = {grant.gpu_uuid for placement in placements for grant in placement.grants}
    if not uuids:
        return {}
    given = select(Allocation.mig_uuid).where(Allocation.to_at.is_(None), Allocation.mig_uuid.is_not(None))
    held = session.scalars(given.where(Allocation.gpu_uuid.in_(uuids)))
    taken = frozenset(filter(None, held))
    mig_mode = Gpu.facts["mig_mode"].as_string()
    columns = (Gpu.uuid, Gpu.node_id, Gpu.model, Gpu.milli_held, Gpu.held_by, mig_mode)
    query = select(*columns).where(Gpu.uuid.in_(uuids), Gpu.health == Health.HEALTHY)
    found = session.execute(query).all()
    devices = _mig_devices(session, [uuid for uuid, *_rest, mode in found if mode == "enabled"])
    reserved = reserved_gpus.by_gpu(session)
    return {
        uuid: LockedGpu(
            node_id=node_id,
            model=model,
            milli_held=held,
            held_by=held_by,
            mig_free=devices[uuid] - taken if mode == "enabled" else None,
            holds=reserved.get(uuid, ()),
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
