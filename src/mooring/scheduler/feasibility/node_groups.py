"""Why each node refuses a request, evaluated by groups of nodes whose GPUs are equal for every rule.

Evaluating each of hundreds of different requests on each of thousands of nodes would be too slow. GPU rules
run once per group, node rules as masks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from cachetools import LRUCache

from mooring.scheduler.cluster import ClusterState, Ints, grown
from mooring.scheduler.feasibility import filters, masks
from mooring.scheduler.feasibility.gpu_rules import gpu_key
from mooring.scheduler.feasibility.stages import Stage
from mooring.scheduler.model import GpuView, NodeView, PlanTime, Request
from mooring.scheduler.node_changes import empty
from mooring.scheduler.packing.node_classes import owner_of
from mooring_client.schemas.spec import WHOLE_MILLI

# How many different requests have cached stages.
_MAX_CACHED = 512
_StageCache = LRUCache[object, dict[int, int]]


@dataclass(frozen=True, slots=True)
class Survey:
    """The stage at which each node refuses one request; quotas are ignored."""

    nodes: Sequence[NodeView | None]  # by index; None: removed
    stage: Ints  # by node: the first failed `Stage`; -1: removed
    group: Ints  # by node
    examples: Mapping[int, NodeView]  # one node of each group, whose nodes have equal GPUs
    all_ready: bool = True
    view: Callable[[NodeView], NodeView] = lambda node: node  # what was surveyed: the node, or `empty`

    def __len__(self) -> int:
        return int((self.stage >= 0).sum())

    @property
    def last_stage(self) -> int:
        """The last stage that any node reaches; -1 without nodes."""
        return int(self.stage.max(initial=-1))

    def left(self) -> list[int]:
        """The nodes that reach the last stage."""
        return np.flatnonzero(self.stage == self.last_stage).tolist()

    def node(self, index: int) -> NodeView:
        """Raises KeyError if the node was removed."""
        if (node := self.nodes[index]) is None:
            raise KeyError(index)
        return self.view(node)

    def groups_left(self) -> list[NodeView]:
        return [
            self.examples[group] for group in np.unique(self.group[self.stage == self.last_stage]).tolist()
        ]

    def most(self, amount: Callable[[NodeView], int]) -> tuple[int, Ints]:
        """The largest `amount`, which depends on GPUs only, of the nodes left, and the nodes that have it."""
        left = np.flatnonzero(self.stage == self.last_stage)
        groups = np.unique(self.group[left])
        amounts = {group: amount(self.examples[group]) for group in groups.tolist()}
        best = max(amounts.values())
        having = [group for group, of_group in amounts.items() if of_group == best]
        return best, left[np.isin(self.group[left], having)]

    def first_name(self, nodes: Ints) -> str:
        named = (self.node(index) for index in nodes.tolist())
        return min((node.name, node.id) for node in named)[0]


class NodeGroups:
    """The nodes of a cluster state, grouped by equal GPUs. Each call updates the groups first."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._seen = 0
        self._numbers: dict[object, int] = {}  # of the groups, by the properties of their GPUs
        self._examples: dict[int, NodeView] = {}
        self._group = np.zeros(0, np.int64)
        # GPU part of a request -> group or node kind -> stage.
        self._stages: _StageCache = LRUCache(_MAX_CACHED)
        self._stages_if_empty: _StageCache = LRUCache(_MAX_CACHED)

    def now(self, request: Request, at: PlanTime) -> Survey:
        self._update()
        cluster = self._cluster
        of_groups = _Stages(self._examples, _cached_stages(request, self._stages), request, at)
        survey = self._survey(self._group, of_groups, masks.stages(cluster, request))
        return replace(survey, all_ready=masks.failing(cluster, filters.STATE, request) is None)

    def if_empty(self, request: Request, at: PlanTime) -> Survey:
        """As if each node were as `node_changes.empty` makes it."""
        self._update()
        cluster = self._cluster
        kinds = cluster.kind_of
        present = np.flatnonzero(masks.present(cluster))
        _numbers, first = np.unique(kinds[present], return_index=True)
        examples = {int(kinds[index]): empty(cluster.node(index)) for index in present[first].tolist()}
        of_kinds = _Stages(examples, _cached_stages(request, self._stages_if_empty), request, at)
        survey = self._survey(kinds, of_kinds, masks.stages(cluster, request, if_empty=True))
        return replace(survey, view=empty)

    def _survey(self, group: Ints, of_groups: "_Stages", stage: Ints) -> Survey:
        """Args: stage: the one at which each node refuses, apart from its GPUs; group: of each node."""
        present = stage >= 0
        of_group = np.full(max(of_groups.examples, default=0) + 1, Stage.FITS, np.int64)
        if of_groups.request.gpu_count:
            for number in np.unique(group[present]).tolist():
                of_group[number] = of_groups.of(number)
        # The group of a removed node may have no example.
        stage[present] = np.minimum(stage[present], of_group[group[present]])
        return Survey(self._cluster.nodes, stage, group, of_groups.examples)

    def _update(self) -> None:
        cluster = self._cluster
        self._group = grown(self._group, len(cluster))
        for index in set(cluster.changes[self._seen :]):
            if (node := cluster.nodes[index]) is not None:
                properties = tuple(sorted(map(_properties, node.gpus), key=repr))
                number = self._numbers.setdefault(properties, len(self._numbers))
                self._examples[number] = node
                self._group[index] = number
        self._seen = len(cluster.changes)


def _properties(gpu: GpuView) -> tuple[object, ...]:
    """All properties of a GPU that rules use."""
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
            refused = filters.gpu_refusal(node, self.request, self.at)
            stage = refused[0] if refused else Stage.FITS
            if not any(gpu.reserved for gpu in node.gpus):  # reservations depend on time
                self.known[group] = stage
        return stage


def _cached_stages(request: Request, stages: _StageCache) -> dict[int, int]:
    key = (request.gpu_count, request.gpu_milli, *gpu_key(request), request.same_numa, owner_of(request))
    return stages.setdefault(key, {})
