"""Why each node refuses a request, evaluated by groups of nodes whose GPUs are equal for every filter.

Evaluating each of hundreds of different requests on each of thousands of nodes would be too slow. GPU filters
run once per group; CPUs and memory are compared as arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from mooring.core.instance.spec import WHOLE_MILLI
from mooring.core.node import NodeState
from mooring.scheduler.cluster import ClusterState, Mask, grown
from mooring.scheduler.feasibility import filters
from mooring.scheduler.feasibility.needs import needs_beside
from mooring.scheduler.model import GpuView, NodeView, PlanTime, Request
from mooring.scheduler.node_changes import empty
from mooring.scheduler.packing import search
from mooring.scheduler.packing.node_classes import ask_of, owner_of

Ints = NDArray[np.int64]
# In the order of `summary`: permanent obstacles before temporary ones.
STAGES: tuple[frozenset[str], ...] = (
    frozenset({"selector_mismatch"}),
    frozenset({"node_reserved"}),
    frozenset({"no_gpu", "gpu_model_mismatch"}),
    frozenset({"gpu_has_mig_enabled", "no_such_mig_profile"}),
    frozenset({"insufficient_gpu_memory"}),
    frozenset({"insufficient_compute_capability"}),
    frozenset({"node_cordoned", "node_draining", "node_not_ready", "node_unreachable"}),
    frozenset(
        {
            "insufficient_gpus",
            "insufficient_gpu_share",
            "insufficient_mig_devices",
            "gpu_shared_by_other_project",
            "gpu_reserved",
            "gpus_not_on_one_numa_node",
        }
    ),
)
LABELS, RESERVED, MODEL, MODE, SIZE, CAPABILITY, STATE, COUNT, BESIDE, FITS = range(len(STAGES) + 2)
_GPU_FILTERS: tuple[filters.Filter, ...] = (
    filters.gpu_model,
    filters.mig,
    filters.gpu_memory,
    filters.compute_capability,
    filters.gpu_count,
)


# Different requests whose stages are cached.
_MAX_CACHED = 512
_StageCache = LRUCache[object, dict[int, int]]


@dataclass(frozen=True, slots=True)
class Survey:
    """The stage at which each node refuses one request; quotas are ignored."""

    nodes: Sequence[NodeView | None]  # by index; None: removed
    # By node: the first failed stage. `BESIDE` is CPUs, memory and disk; `FITS` is none.
    stage: Ints
    group: Ints  # by node
    examples: Mapping[int, NodeView]  # one node of each group: all its nodes have such GPUs
    all_ready: bool
    view: Callable[[NodeView], NodeView] = lambda node: node  # applied to each node of `nodes`

    def __len__(self) -> int:
        return int((self.stage >= 0).sum())

    @property
    def last(self) -> int:
        """The last stage that any node reaches; -1 without nodes."""
        return int(self.stage.max(initial=-1))

    def left(self) -> list[int]:
        """The nodes that reach the last stage."""
        return np.flatnonzero(self.stage == self.last).tolist()

    def node(self, index: int) -> NodeView:
        """Raises KeyError if it was removed."""
        if (node := self.nodes[index]) is None:
            raise KeyError(index)
        return self.view(node)

    def groups_left(self) -> list[NodeView]:
        return [self.examples[group] for group in np.unique(self.group[self.stage == self.last]).tolist()]

    def most(self, amount: Callable[[NodeView], int]) -> tuple[int, Ints]:
        """The largest amount among the nodes left, and the nodes that have it. It depends on GPUs only."""
        left = np.flatnonzero(self.stage == self.last)
        groups = np.unique(self.group[left])
        amounts = {group: amount(self.examples[group]) for group in groups.tolist()}
        best = max(amounts.values())
        having = [group for group, of_group in amounts.items() if of_group == best]
        return best, left[np.isin(self.group[left], having)]

    def first_name(self, nodes: Ints) -> str:
        named = (self.node(index) for index in nodes.tolist())
        return min((node.name, node.id) for node in named)[0]


class NodeGroups:
    """The nodes of a cluster state, grouped by equal GPUs; updated on each call."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._seen = 0
        self._numbers: dict[object, int] = {}
        self._examples: dict[int, NodeView] = {}
        self._group = np.zeros(0, np.int64)
        self._cpu = np.zeros(0, np.int64)
        self._memory = np.zeros(0, np.int64)
        self._ready = np.zeros(0, np.bool_)
        self._there = np.zeros(0, np.bool_)
        # GPU part of a request -> group or node kind -> stage.
        self._stages: _StageCache = LRUCache(_MAX_CACHED)
        self._stages_if_empty: _StageCache = LRUCache(_MAX_CACHED)

    def now(self, request: Request, at: PlanTime) -> Survey:
        self._update()
        stages = _Stages(self._examples, _cached_stages(request, self._stages), request, at)
        short = search.short_of_disk(self._cluster, request)
        return self._survey(request, self._group, stages, self._cpu, self._memory, self._ready, short)

    def if_empty(self, request: Request, at: PlanTime) -> Survey:
        """As if all nodes were ready and healthy, and nothing were running or reserved."""
        self._update()
        cluster = self._cluster
        kinds = cluster.kind_of
        there = np.flatnonzero(self._there)
        _numbers, first = np.unique(kinds[there], return_index=True)
        examples = {int(kinds[index]): empty(cluster.node(index)) for index in there[first].tolist()}
        cpu = np.array([kind.cpu_milli for kind in cluster.kinds], np.int64)[kinds]
        memory = np.array([kind.memory_mib for kind in cluster.kinds], np.int64)[kinds]
        ready = np.ones(len(kinds), np.bool_)
        stages = _Stages(examples, _cached_stages(request, self._stages_if_empty), request, at)
        short = search.short_of_disk(cluster, request, if_empty=True)
        survey = self._survey(request, kinds, stages, cpu, memory, ready, short)
        return replace(survey, view=empty)

    def _survey(
        self,
        request: Request,
        group: Ints,
        stages: "_Stages",
        cpu: Ints,
        memory: Ints,
        ready: Mask,
        short_of_disk: Mask,
    ) -> Survey:
        stage = np.full(len(group), -1, np.int64)
        stage[self._there] = FITS
        wanted_cpu, wanted_memory = self._wanted(request)
        stage[self._there & ((wanted_cpu > cpu) | (wanted_memory > memory) | short_of_disk)] = BESIDE
        of_group = np.full(max(stages.examples, default=0) + 1, FITS, np.int64)
        for number in np.unique(group[self._there]).tolist() if request.gpu_count else ():
            of_group[number] = stages.of(number)
        # Kinds and groups of removed nodes may have no nodes left.
        stage[self._there] = np.minimum(stage[self._there], of_group[group[self._there]])
        stage[self._there & ~ready] = np.minimum(stage, STATE)[self._there & ~ready]
        if (opened := search.open_to(self._cluster, request)) is not None:
            stage[self._there & ~opened] = RESERVED
        if (labelled := search.labelled(self._cluster, request)) is not None:
            stage[self._there & ~labelled] = LABELS
        return Survey(self._cluster.nodes, stage, group, stages.examples, bool(ready[self._there].all()))

    def _wanted(self, request: Request) -> tuple[Ints, Ints]:
        wanted = [
            needs_beside(request, kind.cpu_milli, kind.memory_mib, kind.gpu_count)
            for kind in self._cluster.kinds
        ]
        by_kind = np.array(wanted, np.int64).reshape(-1, 2)[self._cluster.kind_of]
        return by_kind[:, 0], by_kind[:, 1]

    def _update(self) -> None:
        cluster = self._cluster
        self._group, self._cpu, self._memory = (
            grown(array, len(cluster)) for array in (self._group, self._cpu, self._memory)
        )
        self._ready, self._there = (grown(array, len(cluster)) for array in (self._ready, self._there))
        for index in set(cluster.changes[self._seen :]):
            self._read(index, cluster.nodes[index])
        self._seen = len(cluster.changes)

    def _read(self, index: int, node: NodeView | None) -> None:
        self._there[index] = node is not None
        if node is None:
            return
        condition = tuple(sorted(map(_condition, node.gpus), key=repr))
        number = self._numbers.setdefault(condition, len(self._numbers))
        self._examples[number] = node
        self._group[index] = number
        self._cpu[index], self._memory[index] = node.cpu_milli_free, node.memory_mib_free
        self._ready[index] = node.state is NodeState.READY


def _condition(gpu: GpuView) -> tuple[object, ...]:
    """All properties of a GPU that filters use."""
    return (
        gpu.model,
        gpu.memory_mib,
        gpu.compute_capability,
        gpu.numa_node,
        gpu.healthy,
        gpu.milli_free,
        gpu.project_id if 0 < gpu.milli_free < WHOLE_MILLI else None,
        gpu.mig_enabled,
        tuple(sorted((device.profile, device.free) for device in gpu.mig)),
        gpu.reserved,
    )


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stage at which the GPUs of each group refuse one request, cached if it does not depend on time."""

    examples: Mapping[int, NodeView]
    known: dict[int, int]
    request: Request
    at: PlanTime

    def of(self, group: int) -> int:
        stage = self.known.get(group)
        if stage is None:
            node = self.examples[group]
            stage = _gpu_stage(node, self.request, self.at)
            if not any(gpu.reserved for gpu in node.gpus):  # reservations depend on time
                self.known[group] = stage
        return stage


def _cached_stages(request: Request, stages: _StageCache) -> dict[int, int]:
    key = (request.gpu_count, request.gpu_milli, *ask_of(request), request.same_numa, owner_of(request))
    return stages.setdefault(key, {})


def _gpu_stage(node: NodeView, request: Request, at: PlanTime) -> int:
    """The first stage at which the node's GPUs refuse the request; `FITS` if none does."""
    for each in _GPU_FILTERS:
        if codes := {refusal.code for refusal in each(node, request, at)}:
            return next(stage for stage, of_stage in enumerate(STAGES) if codes & of_stage)
    return FITS
