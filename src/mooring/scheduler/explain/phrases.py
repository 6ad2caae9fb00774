"""Phrases for amounts in explanations. They are exact, so that different amounts never look equal."""

from mooring.scheduler.model import Over, Request
from mooring_client.schemas.spec import WHOLE_MILLI


def cpus(milli: int) -> str:
    """`16`, or `0.5` for 500 milli."""
    whole, part = divmod(milli, 1000)
    return f"{whole}.{part:03d}".rstrip("0") if part else str(whole)


def memory(mib: int) -> str:
    """`64 GiB` if that is exact, otherwise MiB."""
    return f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"


def gpus(request: Request, *, free: str = "free ") -> str:
    """`2 free H100 of at least 80 GiB`, `2 free GPUs of one model`, `0.25 of one GPU`, `1 free 1g.10gb`."""
    return f"{_gpus(request, free)}{at_least(request)}{_on_one_numa_node(request)}"


def _gpus(request: Request, free: str) -> str:
    several = request.gpu_count > 1
    if request.mig_profile is not None:
        of_models = f" of an {models(request)}" if request.gpu_models else ""
        return f"{request.gpu_count} {free}{request.mig_profile}{of_models}"
    if request.gpu_milli < WHOLE_MILLI:
        return f"{share(request.gpu_milli)} {free}of one {models(request)}"
    if not request.gpu_models:
        return f"{request.gpu_count} {free}{'GPUs of one model' if several else 'GPU'}"
    return f"{request.gpu_count} {free}{models(request)}"


def models(request: Request) -> str:
    """`H100 or A100`, `GPU`."""
    return " or ".join(request.gpu_models) or "GPU"


def share(milli: int) -> str:
    """`0.25` for 250 thousandths of a GPU."""
    return cpus(milli)


def at_least(request: Request) -> str:
    """The minimum memory and compute capability of each GPU, to append to its name."""
    least, capability = request.gpu_min_memory_mib, request.gpu_min_compute_capability
    size = f" of at least {memory(least)}" if least is not None else ""
    return size + (f" of compute capability {capability}" if capability is not None else "")


def _on_one_numa_node(request: Request) -> str:
    return " on one NUMA node" if request.same_numa and request.gpu_count > 1 else ""


def labels(request: Request) -> str:
    """The node selector: `disk=nvme, zone=a`."""
    return ", ".join(label(request, key, value) for key, value in sorted(request.selector.items()))


def label(request: Request, key: str, value: str) -> str:
    """`zone=a`; `zone=a (required by the project)` if an admin set it for the project."""
    return f"{key}={value}{' (required by the project)' if key in request.project_selector else ''}"


def cpus_and_memory(cpu_milli: int | None, memory_mib: int | None) -> str:
    """`16 CPUs and 64 GiB`; None is the fair share for the GPUs, whose amount depends on the node."""
    if cpu_milli is None and memory_mib is None:
        return "the fair share of CPUs and memory"
    if cpu_milli is None:
        share_or_cpus = "the fair share of CPUs"
    else:
        share_or_cpus = f"{cpus(cpu_milli)} CPU{'' if cpu_milli == 1000 else 's'}"
    return f"{share_or_cpus} and {'the fair share of memory' if memory_mib is None else memory(memory_mib)}"


def amount(quota: str, value: float) -> str:
    """An amount in the unit of a quota: `4`, `0.125`, `64 GiB`."""
    if quota in {"memory_mib", "disk_mib"}:
        return memory(round(value))
    return f"{value:.3f}".rstrip("0").removesuffix(".")


def over(over: Over) -> tuple[str, str]:
    """The `wanted` and `had` of a refusal by quota: the requested amount and what the project has left."""
    limit = amount(over.quota, over.limit)
    if over.asked is None:
        return "GPUs", f"{over.quota}: {amount(over.quota, over.used)} of {limit} used"
    left = amount(over.quota, max(0, over.limit - over.used))
    return amount(over.quota, over.asked), f"{over.quota}: {left} of {limit} left"


def quota_is(over: Over) -> str:
    """`the project's quota gpus is 8: 7 used, 2 asked`."""
    asked = "" if over.asked is None else f", {amount(over.quota, over.asked)} asked"
    used = amount(over.quota, over.used)
    return f"the project's quota {over.quota} is {amount(over.quota, over.limit)}: {used} used{asked}"


def waits_for(over: Over) -> str:
    """Why a pending instance waits for a quota, and until when."""
    until = f"from {over.resets_at} on" if over.resets_at else "when something else of the project ends"
    return f"{quota_is(over)}; it starts {until}, or when an admin raises the quota"


def volumes(request: Request) -> str:
    """`the node of its data: volume data is on gpu-7`."""
    needs = request.volume_needs
    return f"the node of its data: {needs.where}" if needs and needs.where else "a node for its volumes"
