"""The MIG devices of a card that is cut up: what they are, and what is on them.

Their handles are not kept: the driver uses them again for others.
"""

import re
from typing import Any, Final

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml.calls import FAILURES, NvmlGpu, ask, device_name, device_uuid, judged, number_of
from mooring.agent.nvml.samples import process_list

Handle = Any

ENABLED: Final = "enabled"
ANY_COMPUTE_INSTANCE: Final = 0xFFFF_FFFF
# At an index where there is no device now.
_NOBODY: Final = frozenset({nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT})
_PROFILE: Final = re.compile(r"(?:[1-9]c\.)?[1-9]g\.[0-9]+gb(?:\S*)")  # 1g.10gb, 1c.3g.20gb, 1g.5gb+me
_MIB_PER_GB: Final = 1024
_EIGHTHS: Final = 8


def devices(gpu: NvmlGpu, card_mib: int | None) -> list[dict[str, Any]]:
    """Those of now. One that cannot be read this time is told as it was: to vanish ends who has it."""
    if gpu.mig_mode != ENABLED:
        gpu.mig_devices, gpu.mig_places = [], {}
        return []
    handles, is_all = _handles(gpu)
    gpu.mig_places = _places(handles)
    found = [one for one in (_device(handle, card_mib) for handle in handles) if one is not None]
    if not is_all or len(found) < len(handles):
        known = {one["uuid"] for one in found}
        found += [one for one in gpu.mig_devices if one["uuid"] not in known]
    gpu.mig_devices = found
    return found


def uuids_at(gpu: NvmlGpu, gpu_instance: int, compute_instance: int) -> list[str]:
    """The devices that an event is of; none: it is of the whole card, or of a device that is not known."""
    return sorted(
        uuid
        for (gpu_at, compute_at), uuid in gpu.mig_places.items()
        if gpu_at == gpu_instance and compute_instance in {compute_at, ANY_COMPUTE_INSTANCE}
    )


def _places(handles: list[Handle]) -> dict[tuple[int, int], str]:
    found = {}
    for handle in handles:
        place = ask(nvml.nvmlDeviceGetGpuInstanceId, handle), ask(nvml.nvmlDeviceGetComputeInstanceId, handle)
        uuid = ask(device_uuid, handle)
        if uuid and None not in place:
            found[place] = uuid
    return found


def add_to(sample: dict[str, Any], gpu: NvmlGpu) -> None:
    """Writes what is on each device into the card's sample.

    The processes are null as a whole where one device does not tell its own: nothing may be taken for free
    that was only not seen.
    """
    if gpu.mig_mode != ENABLED:
        return
    told, processes, is_known = [], [], True
    for handle in _handles(gpu)[0]:
        uuid = ask(device_uuid, handle)
        if not uuid:
            is_known = False
            continue
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        told.append(
            {
                "uuid": uuid,
                "memory_used_mib": None if memory is None else memory.used >> 20,
                "memory_total_mib": None if memory is None else memory.total >> 20,
            }
        )
        there = _processes(handle)
        is_known = is_known and there is not None
        processes += [{**process, "mig_uuid": uuid} for process in there or ()]
    if told:
        sample["mig_devices"], sample["processes"] = told, processes if is_known else None


def _handles(gpu: NvmlGpu) -> tuple[list[Handle], bool]:
    """And whether these are all."""
    found, is_all = [], True
    for index in range(gpu.ask(nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index))
        except FAILURES as failure:
            judged(failure)
            is_all = is_all and number_of(failure) in _NOBODY
    return found, is_all


def _device(handle: Handle, card_mib: int | None) -> dict[str, Any] | None:
    """None: it does not say which one it is, or what; nobody could ask for it."""
    uuid, memory = ask(device_uuid, handle), ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    profile = _profile(handle, card_mib)
    if not uuid or profile is None:
        return None
    return {"uuid": uuid, "profile": profile, "memory_mib": None if memory is None else memory.total >> 20}


def _profile(handle: Handle, card_mib: int | None) -> str | None:
    """`1g.5gb` of the name "NVIDIA A100-SXM4-40GB MIG 1g.5gb", else made of what the device consists of."""
    named = (ask(device_name, handle) or "").rpartition(" MIG ")[2].strip()
    if _PROFILE.fullmatch(named):
        return named
    parts = ask(nvml.nvmlDeviceGetAttributes_v2, handle)
    if parts is None or not parts.gpuInstanceSliceCount:
        return None
    slices, of_them = parts.gpuInstanceSliceCount, parts.computeInstanceSliceCount
    memory = f"{slices}g.{_nominal_gb(parts.memorySizeMB, card_mib)}gb"
    return memory if of_them in {0, slices} else f"{of_them}c.{memory}"


def _nominal_gb(memory_mib: int, card_mib: int | None) -> int:
    """As NVIDIA's tools name it: memory comes in eighths of the card's, rounded up to whole GB."""
    if not card_mib:
        return round(memory_mib / _MIB_PER_GB)
    eighths = -(-memory_mib * _EIGHTHS // card_mib)
    return round(eighths / _EIGHTHS * -(-card_mib // _MIB_PER_GB))


def _processes(handle: Handle) -> list[dict[str, Any]] | None:
    for list_them in (
        nvml.nvmlDeviceGetComputeRunningProcesses_v3,
        nvml.nvmlDeviceGetComputeRunningProcesses_v2,
    ):
        if (seen := ask(list_them, handle)) is not None:
            return process_list(seen)
    return None
