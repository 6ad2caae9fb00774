"""The rules that decide whether a request fits a node.

All of the scheduler uses `RULES` for nodes and `gpu_rules.GPU_RULES` for their GPUs: placement, explanations,
the masks of `masks`, and the bounds of gangs, backfill and preemption. The guard that checks a placement
before it is written (`control/instances/capacity.py`) has rules of its own.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from mooring.scheduler.cluster import ClusterState
from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility import gpu_offers, gpu_rules, gpu_shortage, needs, quotas
from mooring.scheduler.feasibility.stages import Reason, Stage
from mooring.scheduler.model import NodeView, Over, PlanTime, Refusal, Request, Running
from mooring_client.schemas.nodes import NodeState


@dataclass(frozen=True, slots=True)
class Amount:
    """What an instance takes of a node, and returns when it ends."""

    needed: Callable[[Request, Any], int]  # on a node; also on a node kind, if `total` is set
    free: Callable[[NodeView], int]
    returned: Callable[[Running], int]
    total: Callable[[needs.Sized], int] | None = None  # of a node kind; None: the nodes of a kind differ


def _nothing(_request: Request) -> Hashable:
    return ()


@dataclass(frozen=True, slots=True)
class NodeRule:
    """A condition that a node must meet to host a request. To add a rule, add an entry to `RULES`."""

    name: str
    lacks: Callable[[NodeView, Request], int]  # above 0 if the node fails: the missing amount, or true
    refuse: Callable[[NodeView, Request], Iterable[Reason]]  # the reasons, if the node fails
    stage: Stage = Stage.BESIDE
    # What the rule reads of the request, apart from its project; None: all nodes pass.
    key: Callable[[Request], Hashable] = _nothing
    permanent: bool = False  # only settings of admins decide, not the state of the node
    amount: Amount | None = None  # None: what runs on the node does not matter
    among: Callable[[ClusterState], Collection[int]] | None = None  # the only nodes that can fail
    in_fleet: bool = False  # checked by `Fleet`, so that no mask is needed


class NodeRules:
    """The table of rules, and tuples of their functions for the code that runs for each node and request."""

    def __init__(self, *rules: NodeRule) -> None:
        self.all = rules
        self.last_first = tuple(sorted(rules, key=attrgetter("stage"), reverse=True))
        self.lacks = tuple(rule.lacks for rule in rules)
        self.keys = tuple(rule.key for rule in rules if rule.key is not _nothing)
        self.conditions = tuple(rule.lacks for rule in rules if rule.amount is None)
        self.amounts = tuple((rule.lacks, rule.amount.returned) for rule in rules if rule.amount is not None)


def _label_reasons(node: NodeView, request: Request) -> Iterator[Reason]:
    for key, value in sorted(request.selector.items()):
        if (label := node.labels.get(key)) != value:
            had = f"no label {key}" if label is None else f"{key}={label}"
            yield "selector_mismatch", phrases.label(request, key, value), had


def _volume_reasons(node: NodeView, request: Request) -> Iterator[Reason]:
    needs_volumes = request.volume_needs
    if not node.mounts_volumes:
        yield "volumes_unsupported", "an agent that supports volumes", "an agent of an earlier release"
    elif needs_volumes is not None and not needs_volumes.node_ids <= {node.id}:
        yield "volume_elsewhere", phrases.volumes(request), node.name
    elif needs_volumes is not None:
        labels = ", ".join(f"{key}={value}" for key, value in needs_volumes.selector)
        yield "volume_selector_mismatch", f"{labels} for its volumes", "another label"


def _amount_rule(
    amount: Amount,
    name: str,
    code: str,
    shown: Callable[[int], str],
    key: Callable[[Request], Hashable],
    lacks: Callable[[NodeView, Request], int] | None = None,
) -> NodeRule:
    needed, free = amount.needed, amount.free
    return NodeRule(
        name,
        lacks or (lambda node, request: needed(request, node) - free(node)),
        lambda node, request: [(code, shown(needed(request, node)), shown(max(0, free(node))))],
        key=key,
        amount=amount,
        in_fleet=amount.total is not None,
    )


def _disk_lacking(node: NodeView, request: Request) -> int:
    """0 for a node that does not report its disk."""
    return 0 if node.disk_mib is None else needs.disk(request, node) - node.disk_mib_free


def _no_disk(code: str, had: str) -> Callable[[NodeView, Request], Iterable[Reason]]:
    return lambda node, request: [(code, phrases.memory(needs.disk(request, node)), had)]


_CPUS = Amount(needs.cpus, attrgetter("cpu_milli_free"), attrgetter("cpu_milli"), attrgetter("cpu_milli"))
_MEMORY = Amount(
    needs.memory, attrgetter("memory_mib_free"), attrgetter("memory_mib"), attrgetter("allocatable_mib")
)
_DISK = Amount(needs.disk, attrgetter("disk_mib_free"), attrgetter("disk_mib"))
STATE = NodeRule(
    "state",
    lambda node, _request: node.state is not NodeState.READY,
    lambda node, _request: [(f"node_{node.state}", NodeState.READY, node.state)],
    Stage.STATE,
    in_fleet=True,
)
# In the order in which refusals are listed.
RULES = NodeRules(
    STATE,
    NodeRule(
        "labels",
        lambda node, request: not has_labels(node, request),
        _label_reasons,
        Stage.LABELS,
        key=lambda request: frozenset(selector.items()) if (selector := request.selector) else None,
        permanent=True,
    ),
    NodeRule(
        "reserved",
        lambda node, request: not is_open_to(node, request.project_id),
        # Does not disclose which projects.
        lambda *_: [("node_reserved", "a node open to this project", "reserved for other projects")],
        Stage.RESERVED,
        permanent=True,
        among=attrgetter("reserved"),
    ),
    NodeRule(
        "volumes",
        lambda node, request: request.volume_needs is not None and not request.volume_needs.permit(node),
        _volume_reasons,
        Stage.VOLUMES,
        key=attrgetter("volume_needs"),
    ),
    _amount_rule(_CPUS, "cpus", "insufficient_cpu", phrases.cpus, attrgetter("cpu_milli")),
    _amount_rule(_MEMORY, "memory", "insufficient_memory", phrases.memory, attrgetter("memory_mib")),
    NodeRule(
        "disk",
        lambda node, request: request.disk_limits and not node.disk_enforced,
        lambda *_: [("disk_not_limited", "a node that enforces disk_mib", "no limits")],
        key=lambda request: request.disk_limits or None,
    ),
    NodeRule(
        "disk",
        lambda node, _request: node.disk_pressure,
        _no_disk("disk_pressure", "a nearly full disk"),
        among=attrgetter("with_pressure"),
    ),
    NodeRule(
        "disk",
        lambda node, request: node.disk_mib is None and request.disk_mib is not None,
        _no_disk("insufficient_disk", "unknown: its agent does not report it"),
        key=lambda request: None if request.disk_mib is None else True,
    ),
    _amount_rule(
        _DISK,
        "disk",
        "insufficient_disk",
        phrases.memory,
        attrgetter("disk_mib", "stands_for"),
        _disk_lacking,
    ),
)


def refusals(node: NodeView, request: Request, at: PlanTime) -> Iterator[Refusal]:
    """Every reason why this node cannot host the request now; none if it can."""
    reasons: list[Reason] = []
    for rule in RULES.all:
        if rule.lacks(node, request) > 0:
            reasons.extend(rule.refuse(node, request))
    if of_gpus := gpu_refusal(node, request, at):
        reasons.append(of_gpus[1])
    elif over := over_quota(node, request, at):
        reasons.append(("quota", *phrases.over(over)))
    for code, wanted, had in reasons:
        yield Refusal(node.id, node.name, code, str(wanted), str(had))


def fits(node: NodeView, request: Request, at: PlanTime) -> bool:
    """Whether there is no refusal. Faster than `refusals`, which builds texts."""
    return bool(fitting_offers(node, request, at))


def fitting_offers(node: NodeView, request: Request, at: PlanTime) -> list[gpu_offers.Offer]:
    """The offers within the request's quota, the preferred first; empty if the node cannot host it."""
    for lacks in RULES.lacks:
        if lacks(node, request) > 0:
            return []
    offers = gpu_offers.offers(node, request, at)
    if request.quota is None:
        return offers
    needed = needs.needs(request, node)
    return [offer for offer in offers if not quotas.over(request, offer.model, *needed)]


def gpu_refusal(node: NodeView, request: Request, at: PlanTime) -> tuple[Stage, Reason] | None:
    """Why the GPUs of the node cannot host the request; None if they can."""
    if gpu_offers.offers(node, request, at):
        return None
    unsuitable = gpu_rules.refusal(node.gpus, request)
    return unsuitable or (Stage.COUNT, gpu_shortage.reason(gpu_offers.suitable(node, request), request, at))


def over_quota(node: NodeView, request: Request, at: PlanTime) -> Over | None:
    """The quota that forbids the first offer; None if an offer is within the quotas or there is none."""
    if request.quota is None:
        return None
    needed = needs.needs(request, node)
    models = dict.fromkeys(offer.model for offer in gpu_offers.offers(node, request, at))
    overs = [quotas.over(request, model, *needed) for model in models]
    return overs[0] if overs and all(overs) else None


def admits(node: NodeView, request: Request) -> bool:
    """Whether the settings of admins permit the request on the node, whatever the node's state."""
    return not any(rule.permanent and rule.lacks(node, request) > 0 for rule in RULES.all)


def closed(node: NodeView, request: Request) -> bool:
    """Whether the node would refuse the request even if all its instances ended."""
    for lacks in RULES.conditions:  # noqa: SIM110 (`any` takes twice the time)
        if lacks(node, request) > 0:
            return True
    return False


def has_labels(node: NodeView, request: Request) -> bool:
    selector = request.selector
    return not selector or all(node.labels.get(key) == value for key, value in selector.items())


def is_open_to(node: NodeView, project_id: str) -> bool:
    return node.reserved_for is None or project_id in node.reserved_for
