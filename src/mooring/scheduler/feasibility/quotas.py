"""What a project's quota leaves for a request.

Amounts that are the same on every node count while a request is pending; placement checks them again, with
placed amounts only, because the limit may be lower by then. Amounts that depend on the node (fair shares, the
model if any is accepted) count from placement, which must leave room for the amounts of pending requests.
"""

from collections.abc import Mapping, Set
from dataclasses import replace

from mooring.scheduler.feasibility.needs import fixed, fixed_disk, gpu_milli, matches
from mooring.scheduler.model import Over, Quota, Request

GPUS = "gpus"
OF_MODEL = "gpus_by_model."
INSTANCES = "instances"
CPUS = "cpus"
MEMORY = "memory_mib"
DISK = "disk_mib"

Amounts = Mapping[str, int]


def fixed_amounts(limits: Amounts, request: Request) -> dict[str, int]:
    """The amounts with a limit that are the same on every node."""
    cpu_milli, memory_mib = fixed(request)
    amounts = _amounts(limits, request, cpu_milli, memory_mib)
    # A limit applies if each model that the request accepts matches it.
    certain = [_of_models(limits, request, model) for model in request.gpu_models]
    of_all = set.intersection(*map(set, certain)) if certain else set()
    return amounts | {name: gpu_milli(request) for name in of_all}


def placed_amounts(
    limits: Amounts, request: Request, model: str, cpu_milli: int, memory_mib: int
) -> dict[str, int]:
    """The amounts with a limit of a placement with this GPU model ("": none), CPUs and memory."""
    return _amounts(limits, request, cpu_milli, memory_mib) | _of_models(limits, request, model)


def _amounts(
    limits: Amounts, request: Request, cpu_milli: int | None, memory_mib: int | None
) -> dict[str, int]:
    amounts = {
        GPUS: gpu_milli(request),
        INSTANCES: 1,
        CPUS: cpu_milli,
        MEMORY: memory_mib,
        DISK: fixed_disk(request),
    }
    return {name: amount for name, amount in amounts.items() if amount is not None and name in limits}


def _of_models(limits: Amounts, request: Request, model: str) -> dict[str, int]:
    return {
        name: gpu_milli(request)
        for name in limits
        if name.startswith(OF_MODEL) and matches(name.removeprefix(OF_MODEL), model)
    }


def over_when_queued(quota: Quota, request: Request, count: int = 1) -> Over | None:
    """The first limit that `count` such requests would exceed when they are queued."""
    amounts = {name: count * amount for name, amount in fixed_amounts(quota.limits, request).items()}
    return _first_over(quota, amounts, with_pending=quota.limits.keys())


def over_anywhere(request: Request) -> Over | None:
    """The first limit that keeps the request from every node."""
    if request.quota is None:
        return None
    if request.gpu_count and request.quota.spent:
        return request.quota.spent
    return _first_over(request.quota, fixed_amounts(request.quota.limits, request))


def over(request: Request, model: str, cpu_milli: int, memory_mib: int) -> Over | None:
    """The first limit that forbids a placement with this GPU model ("": none), CPUs and memory."""
    quota = request.quota
    if quota is None:
        return None
    if anywhere := over_anywhere(request):
        return anywhere
    amounts = placed_amounts(quota.limits, request, model, cpu_milli, memory_mib)
    node_dependent = amounts.keys() - fixed_amounts(quota.limits, request).keys()
    return _first_over(quota, amounts, with_pending=node_dependent)


def _first_over(quota: Quota, amounts: Amounts, with_pending: Set[str] = frozenset()) -> Over | None:
    """Args: with_pending: the limits against which pending requests count, too."""
    for name, limit in quota.limits.items():
        wanted = amounts.get(name, 0)
        used = quota.placed.get(name, 0) + (quota.waiting.get(name, 0) if name in with_pending else 0)
        if wanted and used + wanted > limit:
            return Over(name, _shown(name, limit), _shown(name, used), _shown(name, wanted))
    return None


def _shown(name: str, amount: int) -> float:
    in_thousandths = name in {CPUS, GPUS} or name.startswith(OF_MODEL)
    return amount / 1000 if in_thousandths else amount


def with_pending_request(quota: Quota, request: Request) -> Quota:
    """The quota with the request pending."""
    return replace(quota, waiting=_sum(quota.waiting, fixed_amounts(quota.limits, request)))


def without(quota: Quota, request: Request) -> Quota:
    """The quota for a replacement of a pending request: the amounts of other ones count as placed."""
    others = _sum(quota.waiting, fixed_amounts(quota.limits, request), sign=-1)
    return replace(quota, placed=_sum(quota.placed, others), waiting={})


def after(quota: Quota, request: Request, model: str, cpu_milli: int, memory_mib: int) -> Quota:
    """The quota after the placement of a pending request."""
    added = placed_amounts(quota.limits, request, model, cpu_milli, memory_mib)
    waiting = _sum(quota.waiting, fixed_amounts(quota.limits, request), sign=-1)
    return replace(quota, placed=_sum(quota.placed, added), waiting=waiting)


def _sum(amounts: Amounts, more: Amounts, sign: int = 1) -> Amounts:
    return {**amounts, **{name: amounts.get(name, 0) + sign * amount for name, amount in more.items()}}
