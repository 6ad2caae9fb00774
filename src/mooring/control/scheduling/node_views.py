"""The nodes as the scheduler sees them, cached in memory. Only changed nodes are read again."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, Text, cast, select
from sqlalchemy.orm import Session

from mooring.control.instances import durations
from mooring.control.revisions import changed_here
from mooring.control.scheduling import reserved_gpus
from mooring.core.instance.state import HOLDS_GPUS
from mooring.core.node import allocatable_memory_mib, state_of
from mooring.db.tables import Allocation, Gpu, Instance, Node
from mooring.scheduler.model import GpuAllocation, GpuView, MigView, NodeView, Running
from mooring_client.schemas.gpus import Health
from mooring_client.schemas.spec import WHOLE_MILLI
from mooring_client.schemas.states import State

# Each node is read this often even if its revision did not change. Each refresh reads a part of the nodes.
FULL_REFRESH_S = 120.0
_UNKNOWN = -1

# Built once: building them takes as long as their execution, and they are executed all the time.
_REVISIONS: Final = select(Node.id, Node.revision).where(Node.deleted_at.is_(None), Node.facts.is_not(None))
_NODES: Final = (
    select(
        Node.id, Node.name, Node.silent, Node.problem, Node.draining, Node.cordoned, Node.facts,
        Node.reserved_for, Node.orphans,
    )
    .where(Node.deleted_at.is_(None), Node.facts.is_not(None))
    .order_by(Node.id)
)  # fmt: skip
_ALLOCATIONS: Final = (
    select(
        Allocation.instance_id, Allocation.gpu_uuid, Allocation.milli, Allocation.mig_uuid,
        Allocation.lost_node_id,
    )
    .where(Allocation.to_at.is_(None))
    .order_by(Allocation.id)
)  # fmt: skip
_RUNNING: Final = (
    select(
        Instance.id, Instance.project_id, Instance.node_id, Instance.group_id, Instance.cpu_milli,
        Instance.memory_mib, Instance.disk_mib, Instance.priority, Instance.preemptible, Instance.created_at,
        Instance.scheduled_at, Instance.expires_at, durations.COLUMN, Instance.stop_timeout_s, Instance.state,
        Instance.placed_as,
    )
    .where(Instance.state.in_(HOLDS_GPUS), Instance.deleted_at.is_(None))
    .order_by(Instance.id)
)  # fmt: skip
_GPUS: Final = select(
    Gpu.node_id, Gpu.uuid, Gpu.index, Gpu.model, Gpu.memory_mib, Gpu.health, Gpu.milli_held, Gpu.held_by,
    Gpu.placed_last, cast(Gpu.facts, Text),
).order_by(Gpu.uuid)  # fmt: skip


class NodeViews:
    """All nodes, cached for the whole process. Each read refreshes the nodes that changed.

    An unchanged node stays the same object. `nodes.revision` shows which changed: any other value counts, not
    only a higher one, because a transaction may see an older state than an earlier transaction did.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: dict[str, _Cached] = {}  # least recently read first
        self._refreshed_at = clock()
        self._in_order: tuple[NodeView, ...] | None = None

    def current(self, session: Session) -> tuple[NodeView, ...]:
        """Every node as this transaction sees it, in id order.

        Nodes that this transaction itself changed are read from the database and not cached.
        """
        own = changed_here(session)
        with self._lock:
            self._refresh(session, own)
            if self._in_order is None:
                self._in_order = tuple(self._cached[key].view for key in sorted(self._cached))
            views = self._in_order
        if not own:
            return views
        others = (view for view in views if view.id not in own)
        return tuple(sorted((*others, *_views(session, own)), key=lambda view: view.id))

    def invalidate(self, node_ids: Iterable[str]) -> None:
        """Read these nodes again next time, because the cached values turned out to be wrong."""
        with self._lock:
            for node_id in node_ids:
                if cached := self._cached.get(node_id):
                    self._cached[node_id] = replace(cached, revision=_UNKNOWN)

    def _refresh(self, session: Session, excluded: Collection[str]) -> None:
        revisions = dict(session.execute(_REVISIONS).all())
        for deleted in self._cached.keys() - revisions.keys():
            del self._cached[deleted]
            self._in_order = None
        stale = {
            node_id
            for node_id, revision in revisions.items()
            if node_id not in excluded
            and ((cached := self._cached.get(node_id)) is None or cached.revision != revision)
        }
        stale.update(key for key in self._due_for_refresh() if key not in excluded)
        if stale:
            self._read(session, stale, revisions)

    def _due_for_refresh(self) -> list[str]:
        """The least recently read nodes, so many that each node is read every `FULL_REFRESH_S`."""
        each_s = FULL_REFRESH_S / max(1, len(self._cached))
        due = int((self._clock() - self._refreshed_at) / each_s)
        self._refreshed_at += due * each_s
        return list(islice(self._cached, due))

    def _read(self, session: Session, node_ids: Collection[str], revisions: Mapping[str, int]) -> None:
        read_all = len(node_ids) * 2 > len(revisions)
        for view in _views(session, None if read_all else node_ids):
            if view.id not in node_ids:
                continue
            cached = self._cached.pop(view.id, None)  # so that it moves to the end
            if cached is None or cached.view != view:
                cached = _Cached(_UNKNOWN, view)
                self._in_order = None
            self._cached[view.id] = replace(cached, revision=revisions[view.id])


@dataclass(frozen=True, slots=True)
class _Cached:
    revision: int
    view: NodeView


def read(session: Session) -> tuple[NodeView, ...]:
    """Every node in id order, read from the database without the cache."""
    return tuple(_views(session, None))


def _views(session: Session, node_ids: Collection[str] | None) -> list[NodeView]:
    """The views of these nodes (None: of all), in id order."""
    nodes = session.execute(_where_in(_NODES, Node.id, node_ids)).all()
    allocations = _allocations(session, node_ids)
    running = _running(session, node_ids, allocations)
    gpus = _gpus(session, node_ids, allocations)
    return [_view(node, gpus.get(node.id, ()), running.get(node.id, ())) for node in nodes]


def _where_in(query: Any, column: ColumnElement[Any] | Any, ids: Collection[str] | None) -> Any:
    return query if ids is None else query.where(column.in_(ids))


def _view(node: Row[Any], gpus: Sequence[GpuView], running: Sequence[Running]) -> NodeView:
    facts, orphans = node.facts, _used_by_orphans(node)
    cpu_milli, memory = facts["cpus"] * 1000, facts["memory_mib"]
    disk = facts.get("disk") or {}
    return NodeView(
        id=node.id,
        name=node.name,
        state=state_of(
            silent=node.silent,
            problem=node.problem is not None,
            draining=node.draining,
            cordoned=node.cordoned,
        ),
        labels=facts.get("labels", {}),
        cpu_milli=cpu_milli,
        memory_mib=memory,
        cpu_milli_free=cpu_milli - sum(each.cpu_milli for each in running),
        memory_mib_free=allocatable_memory_mib(memory) - sum(each.memory_mib for each in running),
        # An agent of an earlier release allocates whole GPUs only, and none in MIG mode.
        gpus=tuple(_usable(gpu, orphans, mig=bool(facts.get("grants"))) for gpu in gpus),
        swarm=(facts.get("swarm") or {}).get("cluster_id"),
        mps=bool(facts.get("mps")),
        reserved_for=None if node.reserved_for is None else frozenset(node.reserved_for),
        running=tuple(running),
        disk_mib=disk.get("allocatable_mib"),
        disk_mib_free=disk.get("allocatable_mib", 0) - sum(each.disk_mib for each in running),
        disk_enforced=bool(disk.get("enforced")),
        disk_pressure=bool(disk.get("pressure")),
        mounts_volumes=bool(facts.get("mounts_volumes")),
    )


def _used_by_orphans(node: Row[Any]) -> frozenset[str]:
    """The GPUs and MIG devices that containers use which nobody knows: the agent starts nothing on them."""
    return frozenset(uuid for orphan in node.orphans for uuid in orphan.get("gpu_uuids", ()))


def _usable(gpu: GpuView, orphans: frozenset[str], *, mig: bool) -> GpuView:
    """The GPU without the devices that orphans use and, if `mig` is false, without its MIG devices."""
    if gpu.uuid in orphans:
        gpu = replace(gpu, milli_free=0)
    if not mig:
        return replace(gpu, mig=())
    if any(device.uuid in orphans for device in gpu.mig):
        devices = (replace(each, free=each.free and each.uuid not in orphans) for each in gpu.mig)
        return replace(gpu, mig=tuple(devices))
    return gpu


@dataclass(frozen=True, slots=True)
class _Allocations:
    """The current allocations by instance, and the allocated MIG devices."""

    by_instance: Mapping[str, Sequence[GpuAllocation]]
    mig_uuids: frozenset[str]


def _allocations(session: Session, node_ids: Collection[str] | None) -> _Allocations:
    query = _ALLOCATIONS
    if node_ids is not None:
        query = query.join(Gpu, Gpu.uuid == Allocation.gpu_uuid).where(Gpu.node_id.in_(node_ids))
    by_instance: dict[str, list[GpuAllocation]] = defaultdict(list)
    mig_uuids = set()
    for instance_id, uuid, milli, mig_uuid, lost_node_id in session.execute(query):
        mig_uuids.add(mig_uuid)
        if lost_node_id is None:
            by_instance[instance_id].append(GpuAllocation(uuid, milli, mig_uuid))
    return _Allocations(by_instance, frozenset(filter(None, mig_uuids)))


def _running(
    session: Session, node_ids: Collection[str] | None, allocations: _Allocations
) -> dict[str, list[Running]]:
    found: dict[str, list[Running]] = defaultdict(list)
    for each in session.execute(_where_in(_RUNNING, Instance.node_id, node_ids)):
        if each.node_id is not None:
            found[each.node_id].append(_running_instance(each, allocations.by_instance.get(each.id, ())))
    return found


def _running_instance(row: Row[Any], allocations: Sequence[GpuAllocation]) -> Running:
    since = row.scheduled_at or row.created_at
    stop_by = (row.placed_as or {}).get("stop_by")
    declared_end = row.expires_at or durations.end(row, since)
    return Running(
        instance_id=row.id,
        project_id=row.project_id,
        allocations=tuple(allocations),
        cpu_milli=row.cpu_milli or 0,
        memory_mib=row.memory_mib or 0,
        disk_mib=row.disk_mib or 0,
        priority=row.priority,
        preemptible=row.preemptible,
        since=since.timestamp(),
        ends_at=declared_end.timestamp() if stop_by is None and declared_end else stop_by,
        stopping=stop_by is not None or row.state is State.STOPPING,
        group_id=row.group_id,
    )


def _gpus(
    session: Session, node_ids: Collection[str] | None, allocations: _Allocations
) -> dict[str, list[GpuView]]:
    reserved = reserved_gpus.by_gpu(session)
    grouped: dict[str, list[GpuView]] = defaultdict(list)
    query = _where_in(_GPUS, Gpu.node_id, node_ids)
    for node_id, uuid, index, model, memory_mib, health, milli, held_by, last, text in session.execute(query):
        facts = _stored_facts(text)
        grouped[node_id].append(
            GpuView(
                uuid=uuid,
                index=index,
                model=model,
                memory_mib=memory_mib,
                healthy=health is Health.HEALTHY,
                milli_free=WHOLE_MILLI - milli,
                project_id=held_by,
                nvlink=facts.nvlink,
                topology=facts.topology,
                compute_capability=facts.compute_capability,
                numa_node=facts.numa_node,
                mig_enabled=facts.mig_enabled,
                mig=tuple(
                    MigView(mig_uuid, profile, mig_uuid not in allocations.mig_uuids)
                    for mig_uuid, profile in facts.mig
                ),
                reserved=reserved.get(uuid, ()),
                last=last,
            )
        )
    return grouped


@dataclass(frozen=True, slots=True)
class _StoredGpuFacts:
    nvlink: Mapping[str, int]
    topology: Mapping[str, str]
    compute_capability: str | None
    numa_node: int | None
    mig_enabled: bool
    mig: tuple[tuple[str, str], ...]  # UUID and profile of each device


@lru_cache(maxsize=100_000)
def _stored_facts(text: str) -> _StoredGpuFacts:
    """The facts of a GPU from their stored JSON. Cached, because they hardly ever change."""
    read = json.loads(text)
    return _StoredGpuFacts(
        nvlink={peer["uuid"]: peer["links"] for peer in read.get("nvlink_peers", ())},
        topology=read.get("topology", {}),
        compute_capability=read.get("compute_capability"),
        numa_node=read.get("numa_node"),
        mig_enabled=read.get("mig_mode") == "enabled",
        mig=tuple((device["uuid"], device["profile"]) for device in read.get("mig_devices", ())),
    )
