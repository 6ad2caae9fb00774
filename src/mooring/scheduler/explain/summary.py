"""Summarize in one sentence why no node can host a request.

The sentence is about the last `Stage` that any node reaches, and the nodes that reach it. Permanent
obstacles come first: "the only node with an H200 is cordoned" says more than "no ready node has an H200".
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility import filters, gpu_offers, gpu_rules, gpu_shortage
from mooring.scheduler.feasibility.filters import refusals
from mooring.scheduler.feasibility.needs import disk, needs, preference
from mooring.scheduler.feasibility.node_groups import Survey
from mooring.scheduler.feasibility.stages import Stage
from mooring.scheduler.model import GpuView, NodeView, PlanTime, Request
from mooring_client.schemas.spec import WHOLE_MILLI


def summarize(survey: Survey, request: Request, at: PlanTime, *, free: str = "free ") -> str:
    """Explain why no node can host the request now.

    Args:
        free: the word "free "; "" if the nodes are assumed to be empty.
    """
    if len(survey):
        sentence = _SENTENCES[survey.last_stage](_Case(survey, request, at, free))
    else:
        sentence = "no nodes have joined yet"
    where = request.volume_needs.where if request.volume_needs else ""
    return f"{sentence}; {where}" if where else sentence


@dataclass(frozen=True, slots=True)
class _Case:
    survey: Survey
    request: Request
    at: PlanTime
    free: str

    @property
    def no_node(self) -> str:
        """The subject of the sentence: `no ready node with zone=a`."""
        return f"no{'' if self.survey.all_ready else ' ready'} {self._node}"

    @property
    def no_node_in_any_state(self) -> str:
        return f"no {self._node}"

    @property
    def _node(self) -> str:
        return f"node with {phrases.labels(self.request)}" if self.request.selector else "node"

    def suitable(self, node: NodeView) -> list[list[GpuView]]:
        return list(gpu_offers.suitable(node, self.request).values())


def _no_label(case: _Case) -> str:
    plural = "s" if len(case.request.selector) > 1 else ""
    return f"no node has the label{plural} {phrases.labels(case.request)}"


def _all_reserved(case: _Case) -> str:
    return f"{case.no_node_in_any_state} is open to this project: all are reserved for other projects"


def _no_volumes(case: _Case) -> str:
    needs = case.request.volume_needs
    if needs is not None and needs.node_ids:
        return f"{case.no_node_in_any_state} has the data of its volumes"
    if needs is not None and needs.selector:
        labels = ", ".join(f"{key}={value}" for key, value in needs.selector)
        return f"{case.no_node_in_any_state} has {labels}, which its volumes require"
    return f"{case.no_node_in_any_state} has an agent that supports volumes"


def _no_such_gpu(case: _Case) -> str:
    return f"{case.no_node_in_any_state} has any {phrases.models(case.request)}"


def _no_such_mode(case: _Case) -> str:
    if case.request.mig_profile is not None:
        return f"{case.no_node_in_any_state} has any MIG device {case.request.mig_profile}{_on_models(case)}"
    return f"{case.no_node_in_any_state} has any {phrases.models(case.request)} without MIG"


def _on_models(case: _Case) -> str:
    return f" on an {phrases.models(case.request)}" if case.request.gpu_models else ""


def _gpus_too_small(case: _Case) -> str:
    def largest(node: NodeView) -> int:
        return max(
            gpu_rules.memory_of(gpu, case.request)
            for gpu in node.gpus
            if preference(case.request, gpu.model) is not None and gpu_rules.right_mode(gpu, case.request)
        )

    amount, indexes = case.survey.most(largest)
    best = case.survey.first_name(indexes)
    name = f"{phrases.models(case.request)}{phrases.at_least(case.request)}"
    return f"{case.no_node_in_any_state} has any {name} (largest: {phrases.memory(amount)} on {best})"


def _not_capable(case: _Case) -> str:
    name = f"{phrases.models(case.request)}{phrases.at_least(case.request)}"
    return f"{case.no_node_in_any_state} has any {name}"


def _none_ready(case: _Case) -> str:
    left = [case.survey.node(index) for index in case.survey.left()]
    suitable = "" if len(left) == len(case.survey) else "suitable "
    states = Counter(node.state.replace("_", " ") for node in left)
    if len(left) == 1:
        return f"the only {suitable}node, {left[0].name}, is {left[0].state.replace('_', ' ')}"
    if len(states) == 1:
        return f"all {len(left)} {suitable}nodes are {next(iter(states))}"
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"no {suitable}node is ready ({counted})"


def _too_few_gpus(case: _Case) -> str:
    request, at = case.request, case.at
    start = f"{case.no_node} has {phrases.gpus(request, free=case.free)}"
    if request.gpu_milli < WHOLE_MILLI and request.mig_profile is None:
        most, indexes = case.survey.most(lambda node: _most_free_share(case, node))
        amount = phrases.share(most)
    else:
        most, indexes = case.survey.most(
            lambda node: max(_free(of_model, request, at) for of_model in case.suitable(node))
        )
        amount = str(most)
    best = f"best: {amount} on {case.survey.first_name(indexes)}" if most else _none_left(case)
    return f"{start} ({best})"


def _most_free_share(case: _Case, node: NodeView) -> int:
    gpus = (gpu for of_model in case.suitable(node) for gpu in of_model)
    return max(gpu_shortage.free_share(gpu, case.request, case.at) for gpu in gpus)


def _free(gpus: Sequence[GpuView], request: Request, at: PlanTime) -> int:
    """The most GPUs, MIG devices or shares that one allocation could have."""
    numa_groups = gpu_offers.numa_groups(gpus, request)
    counts = (sum(gpu_offers.available(gpu, request, at) for gpu in group) for group in numa_groups)
    return max(counts, default=0)


def _none_left(case: _Case) -> str:
    """Mentions GPUs that are reserved or shared by another project: the API may show them as free."""
    reasons = {
        gpu_shortage.why_not(gpu, case.request, case.at)
        for example in case.survey.groups_left()
        for of_model in case.suitable(example)
        for gpu in of_model
    }
    more = sorted(reasons - {"in use", "quarantined"})
    return f"all are {', '.join(['in use', *more])} or quarantined"


def _too_little_beside(case: _Case) -> str:
    request = case.request
    left = [case.survey.node(index) for index in case.survey.left()]
    lacks_of = {node.id: _lacks(node, request) for node in left}
    closest = min(left, key=lambda node: (len(lacks_of[node.id]), sum(lacks_of[node.id].values()), node.id))
    if request.gpu_count:
        wanted = phrases.cpus_and_memory(request.cpu_milli, request.memory_mib)
        beside = f" beside {phrases.gpus(request, free=case.free)}"
    else:
        wanted, beside = phrases.cpus_and_memory(*needs(request, closest)), ""
    # Most requests have no `disk_mib`: disk is mentioned only if a node lacks it.
    if request.disk_mib is not None or any("disk" in lacks for lacks in lacks_of.values()):
        wanted += f" and {phrases.memory(disk(request, closest))} of disk"
    free = f" {case.free}".rstrip()
    return f"{case.no_node} has {wanted}{free}{beside} (closest: {_failed_checks(case, closest)})"


def _failed_checks(case: _Case, node: NodeView) -> str:
    """`gpu-7: insufficient_cpu wanted 16 had 4`."""
    failed = (
        f"{each.code} wanted {each.wanted} had {each.had}" for each in refusals(node, case.request, case.at)
    )
    return f"{node.name}: {', '.join(failed)}"


def _lacks(node: NodeView, request: Request) -> dict[str, float]:
    """The missing fraction of each amount of which the node has too little; 0 for other failed rules."""
    found: dict[str, float] = {}
    for rule in filters.RULES.all:
        if rule.stage is Stage.BESIDE and (lacks := rule.lacks(node, request)) > 0:
            part = lacks / max(1, rule.amount.needed(request, node)) if rule.amount else 0.0
            found[rule.name] = found.get(rule.name, 0.0) + part
    return found


def _not_its_turn(case: _Case) -> str:
    """The request fits, but the backfill slots of units ahead keep it out."""
    until = "" if case.request.max_duration_s is not None else "; with max_duration_s it might start before"
    return f"the free resources are reserved for others that are ahead in the queue{until}"


_SENTENCES: dict[int, Callable[[_Case], str]] = {
    Stage.LABELS: _no_label,
    Stage.RESERVED: _all_reserved,
    Stage.VOLUMES: _no_volumes,
    Stage.MODEL: _no_such_gpu,
    Stage.MODE: _no_such_mode,
    Stage.SIZE: _gpus_too_small,
    Stage.CAPABILITY: _not_capable,
    Stage.STATE: _none_ready,
    Stage.COUNT: _too_few_gpus,
    Stage.BESIDE: _too_little_beside,
    Stage.FITS: _not_its_turn,
}
