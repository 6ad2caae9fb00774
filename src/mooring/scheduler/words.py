"""How the scheduler speaks of amounts: exact, so that what was wanted and what there was never look alike."""

from mooring.scheduler.model import Over, Request


def cpus(milli: int) -> str:
    """`16`, or `0.5` for 500 milli."""
    whole, part = divmod(milli, 1000)
    return f"{whole}.{part:03d}".rstrip("0") if part else str(whole)


def memory(mib: int) -> str:
    """`64 GiB` where that is exact, else MiB: 65000 MiB beside 64 GiB would both read 64 GiB if rounded."""
    return f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"


def gpus(request: Request, *, free: str = "free ") -> str:
    """`2 free H100 of at least 80 GiB`, `1 free GPU`, `2 free GPUs of one model`."""
    several = request.gpu_count > 1
    any_model = "GPUs of one model" if several else "GPU"
    return f"{request.gpu_count} {free}{request.gpu_model or any_model}{at_least(request)}"


def at_least(request: Request) -> str:
    """The least memory of each GPU, to be appended to its name."""
    least = request.gpu_min_memory_mib
    return f" of at least {memory(least)}" if least is not None else ""


def labels(request: Request) -> str:
    """The node selector as it is written: `disk=nvme, zone=a`."""
    return ", ".join(f"{key}={value}" for key, value in sorted(request.node_selector.items()))


def cpus_and_memory(cpu_milli: int | None, memory_mib: int | None) -> str:
    """`16 CPUs and 64 GiB`; null is the share that goes with the GPUs, a number only once there is a node."""
    if cpu_milli is None and memory_mib is None:
        return "the fair share of CPUs and memory"
    if cpu_milli is None:
        share_or_cpus = "the fair share of CPUs"
    else:
        share_or_cpus = f"{cpus(cpu_milli)} CPU{'' if cpu_milli == 1000 else 's'}"
    return f"{share_or_cpus} and {'the fair share of memory' if memory_mib is None else memory(memory_mib)}"


def amount(quota: str, value: float) -> str:
    """An amount of what a quota limits: `4`, `0.5`, `64 GiB`."""
    if quota == "memory_mib":
        return memory(round(value))
    return f"{value:.1f}".removesuffix(".0")


def over(over: Over) -> tuple[str, str]:
    """What a node is refused for by a quota: what was wanted and what the project has left."""
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
