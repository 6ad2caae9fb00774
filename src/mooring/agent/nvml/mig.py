"""Reads the MIG devices of a GPU: their facts, memory and processes.

Handles are not stored: the driver reuses them for other devices.
"""

import re
from typing import Any, Final

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml.calls import (
    FAILURES,
    NvmlGpu,
    ask,
    device_name,
    device_uuid,
    is_unsupported,
    number_of,
)
from mooring.agent.nvml.samples import process_list

Handle = Any

ENABLED: Final = "enabled"
ANY_COMPUTE_INSTANCE: Final = 0xFFFF_FFFF
# No device has this index.
_NO_DEVICE: Final = frozenset({nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT})
_PROFILE: Final = re.compile(r"(?:[1-9]c\.)?[1-9]g\.[0-9]+gb(?:\S*)")  # 1g.10gb, 1c.3g.20gb, 1g.5gb+me
_MIB_PER_GB: Final = 1024
_EIGHTHS: Final = 8


def devices(gpu: NvmlGpu, gpu_mib: int | None) -> list[dict[str, Any]]:
    """The GPU's MIG devices. An unreadable one is listed as before: its instance fails if it is missing."""
    if gpu.mig_mode != ENABLED:
        gpu.mig_devices, gpu.mig_places = [], {}
        return []
    handles, is_complete = _handles(gpu)
    gpu.mig_places = _places(handles)
    found = [one for one in (_device(handle, gpu_mib) for handle in handles) if one is not None]
    if not is_complete or len(found) < len(handles):
        known = {one["uuid"] for one in found}
        found += [one for one in gpu.mig_devices if one["uuid"] not in known]
    gpu.mig_devices = found
    return found


def uuids_at(gpu: NvmlGpu, gpu_instance: int, compute_instance: int) -> list[str]:
    """The MIG devices that an event is about; none: it is about the whole GPU, or an unknown device."""
    return sorted(
        uuid
        for (gpu_at, compute_at), uuid in gpu.mig_places.items()
        if gpu_at == gpu_instance and compute_instance in {compute_at, ANY_COMPUTE_INSTANCE}
    )


def _places(handles: list[Handle]) -> dict[tuple[int, int], str]:
    """The UUIDs of the MIG devices by GPU instance and compute instance."""
    found = {}
    for handle in handles:
        place = ask(nvml.nvmlDeviceGetGpuInstanceId, handle), ask(nvml.nvmlDeviceGetComputeInstanceId, handle)
        uuid = ask(device_uuid, handle)
        if uuid and None not in place:
            found[place] = uuid
    return found


def add_to(sample: dict[str, Any], gpu: NvmlGpu) -> None:
    """Add the memory and processes of each device to the GPU's sample.

    If the processes of one device are unknown, `processes` is null: that device must not look idle.
    """
    if gpu.mig_mode != ENABLED:
        return
    device_samples, processes, is_known = [], [], True
    handles, _ = _handles(gpu)
    for handle in handles:
        uuid = ask(device_uuid, handle)
        if not uuid:
            is_known = False
            continue
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        device_samples.append(
            {
                "uuid": uuid,
                "memory_used_mib": None if memory is None else memory.used >> 20,
                "memory_total_mib": None if memory is None else memory.total >> 20,
            }
        )
        on_device = _processes(handle)
        is_known = is_known and on_device is not None
        processes += [{**process, "mig_uuid": uuid} for process in on_device or ()]
    if device_samples:
        sample["mig_devices"], sample["processes"] = device_samples, processes if is_known else None


def _handles(gpu: NvmlGpu) -> tuple[list[Handle], bool]:
    """The handles of the GPU's MIG devices, and whether these are all."""
    found, is_complete = [], True
    for index in range(gpu.ask(nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index))
        except FAILURES as failure:
            is_unsupported(failure)  # raises for a fault
            is_complete = is_complete and number_of(failure) in _NO_DEVICE
    return found, is_complete


def _device(handle: Handle, gpu_mib: int | None) -> dict[str, Any] | None:
    """The facts of a MIG device. None: its UUID or profile is unknown, so it cannot be allocated."""
    uuid, memory = ask(device_uuid, handle), ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    profile = _profile(handle, gpu_mib)
    if not uuid or profile is None:
        return None
    return {"uuid": uuid, "profile": profile, "memory_mib": None if memory is None else memory.total >> 20}


def _profile(handle: Handle, gpu_mib: int | None) -> str | None:
    """`1g.5gb` from the name "NVIDIA A100-SXM4-40GB MIG 1g.5gb", else from the device's attributes."""
    named = (ask(device_name, handle) or "").rpartition(" MIG ")[2].strip()
    if _PROFILE.fullmatch(named):
        return named
    attributes = ask(nvml.nvmlDeviceGetAttributes_v2, handle)
    if attributes is None or not attributes.gpuInstanceSliceCount:
        return None
    slices, compute_slices = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    gpu_instance = f"{slices}g.{_nominal_gb(attributes.memorySizeMB, gpu_mib)}gb"
    return gpu_instance if compute_slices in {0, slices} else f"{compute_slices}c.{gpu_instance}"


def _nominal_gb(memory_mib: int, gpu_mib: int | None) -> int:
    """The GB in a profile's name: like NVIDIA's tools, round up to eighths of the GPU's memory."""
    if not gpu_mib:
        return round(memory_mib / _MIB_PER_GB)
    eighths = -(-memory_mib * _EIGHTHS // gpu_mib)
    return round(eighths / _EIGHTHS * -(-gpu_mib // _MIB_PER_GB))


def _processes(handle: Handle) -> list[dict[str, Any]] | None:
    running = ask(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    if running is None:
        running = ask(nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return None if running is None else process_list(running)
