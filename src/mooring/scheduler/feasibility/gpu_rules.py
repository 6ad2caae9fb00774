"""The fixed properties that a GPU must have for a request, whatever is allocated of it."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Protocol, TypeVar

from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility.needs import preference
from mooring.scheduler.feasibility.stages import Reason, Stage
from mooring.scheduler.model import GpuView, MigView, Request


class GpuTraits(Protocol):
    """The properties that rules read, of a GPU or of a `Place`."""

    @property
    def model(self) -> str: ...
    @property
    def memory_mib(self) -> int: ...
    @property
    def compute_capability(self) -> str | None: ...
    @property
    def mig_enabled(self) -> bool: ...
    @property
    def mig(self) -> tuple[MigView, ...]: ...


GpuKey = tuple[Hashable, ...]
Gpu = TypeVar("Gpu", bound=GpuTraits)


@dataclass(frozen=True, slots=True)
class GpuRule:
    """A condition on GPUs. To add a rule, add an entry to `GPU_RULES`, which all of the scheduler uses."""

    stage: Stage
    key: Callable[[Request], Hashable]  # what the rule reads of the request; empty or None: all GPUs pass
    passes: Callable[[GpuTraits, Request], bool]
    refuse: Callable[[Request, Sequence[GpuView]], Reason]  # the reason, if none of these GPUs passes


def passing(gpus: Iterable[Gpu], request: Request) -> list[Gpu]:
    """The GPUs that pass all rules, in use or not."""
    found = list(gpus)
    for rule in GPU_RULES:
        if rule.key(request):
            passes = rule.passes
            found = [gpu for gpu in found if passes(gpu, request)]
    return found


def refusal(gpus: Sequence[GpuView], request: Request) -> tuple[Stage, Reason] | None:
    """The stage and reason of the first rule that leaves no GPU; None if some GPUs pass all rules."""
    if not gpus:
        return Stage.MODEL, ("no_gpu", phrases.gpus(request), "no GPU")
    for rule in GPU_RULES:
        if rule.key(request):
            left = [gpu for gpu in gpus if rule.passes(gpu, request)]
            if not left:
                return rule.stage, rule.refuse(request, gpus)
            gpus = left
    return None


def gpu_key(request: Request) -> GpuKey:
    """All properties of a request that decide which GPUs suit it."""
    return tuple([rule.key(request) for rule in GPU_RULES])


def right_mode(gpu: GpuTraits, request: Request) -> bool:
    """With MIG enabled, only the MIG devices of a GPU are allocated."""
    if request.mig_profile is None:
        return not gpu.mig_enabled
    return gpu.mig_enabled and any(device.profile == request.mig_profile for device in gpu.mig)


def memory_of(gpu: GpuTraits, request: Request) -> int:
    """The memory (MiB) of the GPU, or of the requested MIG device."""
    return gpu.memory_mib if request.mig_profile is None else mig_memory_mib(request.mig_profile)


@lru_cache(maxsize=256)
def mig_memory_mib(profile: str) -> int:
    """MiB by the profile's name: 10240 for `1g.10gb`; 0 if the name has no size."""
    size = profile.partition(".")[2].partition("gb")[0]
    return int(size) * 1024 if size.isdigit() else 0


def capable_enough(gpu: GpuTraits, request: Request) -> bool:
    """A GPU of unknown compute capability fails any minimum."""
    least = request.gpu_min_compute_capability or ""
    return gpu.compute_capability is not None and version(gpu.compute_capability) >= version(least)


@lru_cache(maxsize=256)
def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _no_mode(request: Request, gpus: Sequence[GpuView]) -> Reason:
    if request.mig_profile is None:
        return "gpu_has_mig_enabled", "a GPU without MIG", "MIG is enabled on all of them"
    profiles = sorted({device.profile for gpu in gpus if gpu.mig_enabled for device in gpu.mig})
    return "no_such_mig_profile", request.mig_profile, ", ".join(profiles) or "no MIG devices"


def _no_model(request: Request, gpus: Sequence[GpuView]) -> Reason:
    return "gpu_model_mismatch", phrases.models(request), ", ".join(sorted({gpu.model for gpu in gpus}))


def _too_small(request: Request, gpus: Sequence[GpuView]) -> Reason:
    largest = max(memory_of(gpu, request) for gpu in gpus)
    return "insufficient_gpu_memory", phrases.memory(request.gpu_min_memory_mib or 0), phrases.memory(largest)


def _not_capable(request: Request, gpus: Sequence[GpuView]) -> Reason:
    had = ", ".join(sorted({gpu.compute_capability or "unknown" for gpu in gpus}))
    return "insufficient_compute_capability", request.gpu_min_compute_capability or "", had


GPU_RULES: tuple[GpuRule, ...] = (
    GpuRule(
        Stage.MODEL,
        attrgetter("gpu_models"),
        lambda gpu, request: preference(request, gpu.model) is not None,
        _no_model,
    ),
    GpuRule(Stage.MODE, lambda request: (request.mig_profile,), right_mode, _no_mode),
    GpuRule(
        Stage.SIZE,
        attrgetter("gpu_min_memory_mib"),
        lambda gpu, request: memory_of(gpu, request) >= (request.gpu_min_memory_mib or 0),
        _too_small,
    ),
    GpuRule(Stage.CAPABILITY, attrgetter("gpu_min_compute_capability"), capable_enough, _not_capable),
)
