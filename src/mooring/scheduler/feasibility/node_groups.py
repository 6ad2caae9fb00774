"""All nodes at a glance: what keeps a request from each of them, found by groups of nodes that are alike.

Thousands of nodes times hundreds of different requests would be too much for one question each. Cards in the
same condition refuse alike, so each condition is asked once; CPUs and memory are compared as arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
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
# In this order they are told: what never changes before what passes (see `summary`).
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
_OF_CARDS: tuple[filters.Filter, ...] = (
    filters.gpu_model,
    filters.mig,
    filters.gpu_memory,
    filters.compute_capability,
    filters.gpu_count,
)


# Requests of which it is remembered where the cards of each group stop them.
_MAX_ASKED = 512


@dataclass(frozen=True, slots=True)
class Survey:
    """Where each node stops one request, quotas aside."""

    nodes: Sequence[NodeView | None]  # by index; null: no longer there
    # By node: the first stage that it does not pass; `BESIDE` is CPUs, memory and disk, `FITS` nothing.
    stage: Ints
    group: Ints  # by node
    examples: Mapping[int, NodeView]  # a node of each group, whose cards stand for all in it
    all_ready: bool
    seen_as: Callable[[NodeView], NodeView] = lambda node: node  # how the nodes are thought to be

    def __len__(self) -> int:
        return int((self.stage >= 0).sum())

    @property
    def last(self) -> int:
        """The stage that the farthest of the nodes came to; -1 without nodes."""
        return int(self.stage.max(initial=-1))

    def left(self) -> list[int]:
        """The nodes that came so far."""
        return np.flatnonzero(self.stage == self.last).tolist()

    def node(self, index: int) -> NodeView:
        """KeyError if it is no longer there."""
        if (node := self.nodes[index]) is None:
            raise KeyError(index)
        return self.seen_as(node)

    def groups_left(self) -> list[NodeView]:
        """An example of each group of which nodes are left."""
        return [self.examples[group] for group in np.unique(self.group[self.stage == self.last]).tolist()]

    def most(self, amount: Callable[[NodeView], int]) -> tuple[int, Ints]:
        """The largest amount that the cards of the nodes left have, and the nodes that have it."""
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
    """The nodes of a world by the condition of their cards, brought up to date when it is asked."""

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
        # What of a request cards are asked about -> group, or kind, -> stage.
        self._stages: dict[object, dict[int, int]] = {}
        self._stages_if_empty: dict[object, dict[int, int]] = {}

    def now(self, request: Request, at: PlanTime) -> Survey:
        self._update()
        stages = _Stages(self._examples, _known(request, self._stages), request, at)
        short = search.short_of_disk(self._cluster, request)
        return self._survey(request, self._group, stages, self._cpu, self._memory, self._ready, short)

    def if_empty(self, request: Request, at: PlanTime) -> Survey:
        """As if all nodes were schedulable and healthy, and nothing ran or was held anywhere."""
        self._update()
        cluster = self._cluster
        kinds = cluster.kind_of
        there = np.flatnonzero(self._there)
        _numbers, first = np.unique(kinds[there], return_index=True)
        examples = {int(kinds[index]): empty(cluster.node(index)) for index in there[first].tolist()}
        cpu = np.array([kind.cpu_milli for kind in cluster.kinds], np.int64)[kinds]
        memory = np.array([kind.memory_mib for kind in cluster.kinds], np.int64)[kinds]
        ready = np.ones(len(kinds), np.bool_)
        stages = _Stages(examples, _known(request, self._stages_if_empty), request, at)
        short = search.short_of_disk(cluster, request, if_empty=True)
        survey = self._survey(request, kinds, stages, cpu, memory, ready, short)
        return replace(survey, seen_as=empty)

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
        # Only of nodes that are there: kinds and groups of those that went may be of none now.
        stage[self._there] = np.minimum(stage[self._there], of_group[group[self._there]])
        stage[self._there & ~ready] = np.minimum(stage, STATE)[self._there & ~ready]
        if (opened := search.open_to(self._cluster, request)) is not None:
            stage[self._there & ~opened] = RESERVED
        if (labelled := search.labelled(self._cluster, request)) is not None:
            stage[self._there & ~labelled] = LABELS
        return Survey(self._cluster.nodes, stage, group, stages.examples, bool(ready[self._there].all()))

    def _wanted(self, request: Request) -> tuple[Ints, Ints]:
        """The CPUs and memory that it takes on each node."""
        wanted = [
            needs_beside(request, kind.cpu_milli, kind.memory_mib, kind.gpu_count)
            for kind in self._cluster.kinds
        ]
        by_kind = np.array(wanted, np.int64).reshape(-1, 2)[self._cluster.kind_of]
        return by_kind[:, 0], by_kind[:, 1]

    # ---- up to date

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
    """All of a card that rules ask about."""
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
        gpu.holds,
    )


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stage at which the cards of each group stop one request, remembered where it is always the same."""

    examples: Mapping[int, NodeView]
    known: dict[int, int]
    request: Request
    at: PlanTime

    def of(self, group: int) -> int:
        stage = self.known.get(group)
        if stage is None:
            node = self.examples[group]
            stage = _stage_of_cards(node, self.request, self.at)
            if not any(gpu.holds for gpu in node.gpus):  # of which time makes something else
                self.known[group] = stage
        return stage


def _known(request: Request, stages: dict[object, dict[int, int]]) -> dict[int, int]:
    key = (request.gpu_count, request.gpu_milli, *ask_of(request), request.same_numa, owner_of(request))
    if len(stages) >= _MAX_ASKED and key not in stages:
        stages.clear()
    return stages.setdefault(key, {})


def _stage_of_cards(node: NodeView, request: Request, at: PlanTime) -> int:
    """The first stage at which the node's cards stop the request; `FITS` if none does."""
    for rule in _OF_CARDS:
        if codes := {refusal.code for refusal in rule(node, request, at)}:
            return next(stage for stage, of_stage in enumerate(STAGES) if codes & of_stage)
    return FITS
