"""Why the GPUs of a node that suit a request do not suffice now."""

from collections.abc import Callable, Mapping, Sequence

from mooring.scheduler.explain import phrases
from mooring.scheduler.feasibility import gpu_offers
from mooring.scheduler.feasibility.stages import Reason
from mooring.scheduler.model import GpuView, PlanTime, Request
from mooring_client.schemas.spec import WHOLE_MILLI


def reason(suitable: Mapping[str, Sequence[GpuView]], request: Request, at: PlanTime) -> Reason:
    """Why the suitable GPUs of a node, by model, do not suffice now."""
    return _code(suitable, request, at), phrases.gpus(request), _counts(suitable, request, at)


def _code(suitable: Mapping[str, Sequence[GpuView]], request: Request, at: PlanTime) -> str:
    """Name the restriction without which one model would suffice, or else what there is too little of."""

    def enough(count_of: Callable[[GpuView], int]) -> bool:
        return any(sum(count_of(gpu) for gpu in group) >= request.gpu_count for group in suitable.values())

    if enough(lambda gpu: gpu_offers.available(gpu, request, at)):
        return "gpus_not_on_one_numa_node"
    if enough(lambda gpu: gpu_offers.available_unreserved(gpu, request)):
        return "gpu_reserved"
    if request.mig_profile is not None:
        return "insufficient_mig_devices"
    if request.gpu_milli == WHOLE_MILLI:
        return "insufficient_gpus"
    if enough(lambda gpu: gpu_offers.available_unowned(gpu, request)):
        return "gpu_shared_by_other_project"
    return "insufficient_gpu_share"


def _counts(suitable: Mapping[str, Sequence[GpuView]], request: Request, at: PlanTime) -> str:
    """`1 free of 8 (6 in use, 1 quarantined)` of the model with the most free, named if there are others."""
    model, gpus = min(suitable.items(), key=lambda item: (-_free(item[1], request, at), item[0]))
    name = f" {model}" if len(suitable) > 1 else ""
    if request.mig_profile is not None:
        devices = sum(each.profile == request.mig_profile for gpu in gpus for each in gpu.mig)
        return f"{_free(gpus, request, at)} free of {devices}{name}{_why_not_free(gpus, request, at)}"
    if request.gpu_milli < WHOLE_MILLI:
        most = max((free_share(gpu, request, at) for gpu in gpus), default=0)
        return f"at most {phrases.share(most)} of one{name}{_why_not_free(gpus, request, at)}"
    return f"{_free(gpus, request, at)} free of {len(gpus)}{name}{_why_not_free(gpus, request, at)}"


def _free(gpus: Sequence[GpuView], request: Request, at: PlanTime) -> int:
    return sum(gpu_offers.available(gpu, request, at) for gpu in gpus)


def free_share(gpu: GpuView, request: Request, at: PlanTime) -> int:
    """The largest share of the GPU that the request could have now."""
    closed = not gpu.healthy or gpu_offers.others_share(gpu, request) or gpu_offers.reserved(gpu, request, at)
    return 0 if closed else gpu.milli_free


def _why_not_free(gpus: Sequence[GpuView], request: Request, at: PlanTime) -> str:
    """Counts each unusable GPU once, under the first reason that applies."""
    counts = {"quarantined": 0, "reserved": 0, "shared by another project": 0, "in use": 0}
    for gpu in gpus:
        if not gpu_offers.available(gpu, request, at):
            counts[why_not(gpu, request, at)] += 1
    order = ("in use", "shared by another project", "reserved", "quarantined")
    parts = [f"{counts[reason]} {reason}" for reason in order if counts[reason]]
    return f" ({', '.join(parts)})" if parts else ""


def why_not(gpu: GpuView, request: Request, at: PlanTime) -> str:
    """Why the request can use nothing of the GPU now."""
    if (
        gpu_offers.others_share(gpu, request)
        and gpu_offers.available_unowned(gpu, request)
        and request.gpu_milli < WHOLE_MILLI
    ):
        return "shared by another project"
    if gpu_offers.available_unreserved(gpu, request):
        return "reserved"
    return "in use" if gpu.healthy or not gpu.free else "quarantined"
