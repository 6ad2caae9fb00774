"""Applies the rules of `filters.RULES` to all nodes of a cluster at once."""

from collections.abc import Callable

import numpy as np

from mooring.scheduler.cluster import ClusterState, Ints, Mask
from mooring.scheduler.feasibility import filters
from mooring.scheduler.feasibility.filters import Amount, NodeRule
from mooring.scheduler.feasibility.stages import Stage
from mooring.scheduler.model import NodeView, Request
from mooring.scheduler.node_changes import empty
from mooring.scheduler.packing.node_classes import NodeKind


def passing(cluster: ClusterState, request: Request, *, permanent: bool = False) -> Mask | None:
    """The nodes that pass the rules that the fleet does not compute itself; None: all.

    Args:
        permanent: only permanent rules count, as in `filters.admits`.
    """
    found: Mask | None = None
    for rule in filters.RULES.all:
        if rule.permanent if permanent else not rule.in_fleet:
            failed = failing(cluster, rule, request)
            found = found if failed is None else both(found, ~failed)
    return found


def present(cluster: ClusterState) -> Mask:
    return cluster.mask("present", lambda _node: True)


def failing(cluster: ClusterState, rule: NodeRule, request: Request) -> Mask | None:
    """The nodes that fail the rule; None: no node does."""
    if rule.among is not None:
        failed = [index for index in rule.among(cluster) if rule.lacks(cluster.node(index), request) > 0]
        if not failed:
            return None
        mask = np.zeros(len(cluster), np.bool_)
        mask[failed] = True
        return mask
    if (key := rule.key(request)) is None:
        return None
    mask = cluster.mask((rule.lacks, key), lambda node: rule.lacks(node, request) > 0)
    return mask if mask.any() else None


def stages(cluster: ClusterState, request: Request, *, if_empty: bool = False) -> Ints:
    """The first stage at which each node fails a rule; `FITS` if it passes all; -1: removed.

    Args:
        if_empty: as if each node were as `node_changes.empty` makes it.
    """
    found = np.full(len(cluster), int(Stage.FITS))
    on_empty_nodes: list[NodeRule] = []
    for rule in filters.RULES.last_first:
        if rule.amount is not None and rule.amount.total is not None:
            total = rule.amount.total if if_empty else None
            failed: Mask | None = _short(cluster, rule.amount, request, total)
        elif rule.permanent or not if_empty:
            failed = failing(cluster, rule, request)
        else:
            on_empty_nodes.append(rule)
            continue
        if failed is not None:
            found[failed] = int(rule.stage)

    def first_stage(node: NodeView) -> int:
        emptied = empty(node)
        failed = (rule.stage for rule in on_empty_nodes if rule.lacks(emptied, request) > 0)
        return min(failed, default=Stage.FITS)

    if on_empty_nodes:
        key = tuple([(rule.lacks, rule.key(request)) for rule in on_empty_nodes])
        found = np.minimum(found, cluster.numbers(("if empty", key), first_stage))
    return np.where(present(cluster), found, -1)


def _short(
    cluster: ClusterState, amount: Amount, request: Request, total: Callable[[NodeKind], int] | None
) -> Mask:
    """The nodes with too little free, or too little in total if `total` is set; without a call per node."""
    needed = np.array([amount.needed(request, kind) for kind in cluster.kinds], np.int64)
    if total is None:
        return needed[cluster.kind_of] > cluster.numbers(amount.free, amount.free)
    short = needed > np.array([total(kind) for kind in cluster.kinds], np.int64)
    return short[cluster.kind_of]


def both(a: Mask | None, b: Mask | None) -> Mask | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
