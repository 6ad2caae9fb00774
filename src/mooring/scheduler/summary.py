"""One sentence for people, out of all the refusals of all the nodes.

It is found by a funnel: rules are taken in the order of `_STAGES`, each lets through the nodes that do not
break it, and the rule that stops the last of them is the one worth telling, of the nodes that came that far.
What never changes comes before what passes: that the only node with an H200 is cordoned says more than
that the other nine, which are ready, have none.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mooring.core.node import NodeState
from mooring.scheduler import words
from mooring.scheduler.filters import needs, suitable_gpus, usable
from mooring.scheduler.model import NodeView, Refusal, Request


def summarize(
    nodes: Sequence[NodeView], request: Request, refused: Sequence[Refusal], *, free: str = "free "
) -> str:
    """Say why none of the nodes, each of which is in `refused`, can host the request.

    Args:
        free: how to call what is left of a node; "" where the nodes are thought empty.
    """
    if not nodes:
        return "no nodes have joined yet"
    of_node: dict[str, list[Refusal]] = {}
    for refusal in refused:
        of_node.setdefault(refusal.node_id, []).append(refusal)
    left = nodes
    for codes, sentence in _STAGES:
        passing = [node for node in left if not any(each.code in codes for each in of_node[node.id])]
        if not passing:
            return sentence(_Case(nodes, left, request, of_node, free))
        left = passing
    return _too_little_beside(_Case(nodes, left, request, of_node, free))


@dataclass(frozen=True, slots=True)
class _Case:
    nodes: Sequence[NodeView]
    left: Sequence[NodeView]  # those that the earlier stages let through
    request: Request
    of_node: dict[str, list[Refusal]]
    free: str

    @property
    def no_node(self) -> str:
        """The subject of the sentence: `no ready node with zone=a`."""
        ready = "" if all(node.state is NodeState.READY for node in self.nodes) else " ready"
        return f"no{ready} {self._node}"

    @property
    def no_node_in_any_state(self) -> str:
        return f"no {self._node}"

    @property
    def _node(self) -> str:
        return f"node with {words.labels(self.request)}" if self.request.node_selector else "node"


def _no_label(case: _Case) -> str:
    plural = "s" if len(case.request.node_selector) > 1 else ""
    return f"no node has the label{plural} {words.labels(case.request)}"


def _no_such_gpu(case: _Case) -> str:
    return f"{case.no_node_in_any_state} has any {case.request.gpu_model or 'GPU'}"


def _gpus_too_small(case: _Case) -> str:
    of_any_size = replace(case.request, gpu_min_memory_mib=None)
    largest = {
        node.id: max(gpu.memory_mib for gpus in suitable_gpus(node, of_any_size).values() for gpu in gpus)
        for node in case.left
    }
    amount, best = _most(case, largest)
    name = f"{case.request.gpu_model or 'GPU'}{words.at_least(case.request)}"
    return f"{case.no_node_in_any_state} has any {name} (largest: {words.memory(amount)} on {best})"


def _none_ready(case: _Case) -> str:
    suitable = "" if len(case.left) == len(case.nodes) else "suitable "
    states = Counter(node.state.replace("_", " ") for node in case.left)
    if len(case.left) == 1:
        return f"the only {suitable}node, {case.left[0].name}, is {case.left[0].state.replace('_', ' ')}"
    if len(states) == 1:
        return f"all {len(case.left)} {suitable}nodes are {next(iter(states))}"
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"no {suitable}node is ready ({counted})"


def _too_few_gpus(case: _Case) -> str:
    most = {
        node.id: max(len(usable(gpus)) for gpus in suitable_gpus(node, case.request).values())
        for node in case.left
    }
    amount, best = _most(case, most)
    there = f"best: {amount} on {best}" if amount else "all are in use or quarantined"
    return f"{case.no_node} has {words.gpus(case.request, free=case.free)} ({there})"


def _most(case: _Case, amounts: dict[str, int]) -> tuple[int, str]:
    """The largest amount and the name of the node that has it."""
    best = min(case.left, key=lambda node: (-amounts[node.id], node.name, node.id))
    return amounts[best.id], best.name


def _too_little_beside(case: _Case) -> str:
    request, beside = case.request, ""
    if request.gpu_count:
        wanted = words.cpus_and_memory(request.cpu_milli, request.memory_mib)
        beside = f" beside {words.gpus(request, free=case.free)}"
    else:
        wanted = words.cpus_and_memory(*needs(request, case.left[0]))
    free = f" {case.free}".rstrip()
    return f"{case.no_node} has {wanted}{free}{beside} (closest: {_closest(case)})"


def _closest(case: _Case) -> str:
    """`gpu-7: insufficient_cpu wanted 16 had 4`, of the node that breaks the fewest rules by the least."""
    best = min(case.left, key=lambda node: (len(case.of_node[node.id]), _lack(node, case.request), node.id))
    broken = (f"{each.code} wanted {each.wanted} had {each.had}" for each in case.of_node[best.id])
    return f"{best.name}: {', '.join(broken)}"


def _lack(node: NodeView, request: Request) -> float:
    """The missing parts of the CPUs and of the memory asked for, added up."""
    cpu_milli, memory_mib = needs(request, node)
    cpu_lack = max(0, cpu_milli - node.cpu_milli_free) / max(1, cpu_milli)
    return cpu_lack + max(0, memory_mib - node.memory_mib_free) / max(1, memory_mib)


# Refusals of any other code, those of a rule to come included, are told by `_too_little_beside`.
_STAGES: tuple[tuple[frozenset[str], Callable[[_Case], str]], ...] = (
    (frozenset({"selector_mismatch"}), _no_label),
    (frozenset({"no_gpu", "gpu_model_mismatch"}), _no_such_gpu),
    (frozenset({"insufficient_gpu_memory"}), _gpus_too_small),
    (frozenset({"node_cordoned", "node_draining", "node_not_ready", "node_unreachable"}), _none_ready),
    (frozenset({"insufficient_gpus"}), _too_few_gpus),
)
