"""One live reading of a card: a handful of NVML calls, each of which may fail without harm to the others.

A reading writes its fields into the sample. One that a card does not support is replaced by its older
form, or falls out of the card's list, and is not asked again before NVML is started anew.
"""

import os
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml_calls import FAILURES, Call, Gpu, GpuFaultError, ask, judged, process_name

Sample = dict[str, Any]
Handle = Any

NO_PID = 0xFFFF_FFFF
NAMES_KEPT = 4096
BLANK: Sample = {
    "uuid": "",
    "index": 0,
    "sampled_at": "",
    "utilization_gpu_pct": None,
    "utilization_memory_pct": None,
    "memory_used_mib": None,
    "memory_total_mib": None,
    "power_w": None,
    "power_limit_w": None,
    "temperature_c": None,
    "sm_clock_mhz": None,
    "memory_clock_mhz": None,
    "fan_pct": None,
    "energy_j": None,
    "processes": None,
}

_names: dict[int, tuple[int, str | None]] = {}  # pid -> (inode of /proc/<pid>, name)


def sample_of(gpu: Gpu, at: str) -> Sample:
    """What the card shows now; all nulls, and `gpu.fault` set, where it cannot be read."""
    sample = {**BLANK, "uuid": gpu.uuid, "index": gpu.index, "sampled_at": at}
    gpu.fault = None
    try:
        for reading in gpu.readings:
            try:
                reading(gpu.handle, sample)
            except FAILURES as failure:
                _missed(gpu, reading, sample, failure)
    except GpuFaultError as fault:
        gpu.fault = fault.code
        return {**BLANK, "uuid": gpu.uuid, "index": gpu.index, "sampled_at": at}
    return sample


def _missed(gpu: Gpu, reading: Call, sample: Sample, failure: Exception) -> None:
    """Takes an unsupported reading off the card's list, and tries its older form instead."""
    if not judged(failure):
        return
    older = OLDER.get(reading)
    substitute = (older,) if older else ()
    at = gpu.readings.index(reading)
    gpu.readings = (*gpu.readings[:at], *substitute, *gpu.readings[at + 1 :])
    if older:
        try:
            older(gpu.handle, sample)
        except FAILURES as again:
            _missed(gpu, older, sample, again)


def _utilization(handle: Handle, sample: Sample) -> None:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    sample["utilization_gpu_pct"] = rates.gpu
    sample["utilization_memory_pct"] = rates.memory


def _memory(handle: Handle, sample: Sample) -> None:
    """Bytes; version 2 does not count what the driver reserves for itself as used."""
    _write_memory(sample, nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2))


def _memory_v1(handle: Handle, sample: Sample) -> None:
    _write_memory(sample, nvml.nvmlDeviceGetMemoryInfo(handle))


def _write_memory(sample: Sample, memory: Any) -> None:  # noqa: ANN401
    sample["memory_used_mib"] = memory.used >> 20
    sample["memory_total_mib"] = memory.total >> 20


def _power(handle: Handle, sample: Sample) -> None:
    """Milliwatts: the mean of 1 s since Ampere, except GA100, and the present value before."""
    sample["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000


def _power_limit(handle: Handle, sample: Sample) -> None:
    sample["power_limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000


def _temperature(handle: Handle, sample: Sample) -> None:
    sample["temperature_c"] = nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)


def _temperature_v1(handle: Handle, sample: Sample) -> None:
    sample["temperature_c"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)


def _sm_clock(handle: Handle, sample: Sample) -> None:
    sample["sm_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)


def _memory_clock(handle: Handle, sample: Sample) -> None:
    sample["memory_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)


def _fan(handle: Handle, sample: Sample) -> None:
    sample["fan_pct"] = nvml.nvmlDeviceGetFanSpeed(handle)


def _energy(handle: Handle, sample: Sample) -> None:
    """Millijoules since the driver was loaded."""
    sample["energy_j"] = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


def _compute(handle: Handle, sample: Sample) -> None:
    _add_processes(sample, nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))


def _compute_v2(handle: Handle, sample: Sample) -> None:
    _add_processes(sample, nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


def _graphics(handle: Handle, sample: Sample) -> None:
    _add_processes(sample, nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle))


def _graphics_v2(handle: Handle, sample: Sample) -> None:
    _add_processes(sample, nvml.nvmlDeviceGetGraphicsRunningProcesses_v2(handle))


def _add_processes(sample: Sample, seen: list[Any]) -> None:
    """Adds those that exist: drivers 535.43 to 535.86 gave scrambled pids to newer callers."""
    if sample["processes"] is None:
        sample["processes"] = []
    listed = {process["pid"] for process in sample["processes"]}
    for process in seen:
        pid = process.pid
        inode = _inode_of(pid)
        if inode and pid not in listed:
            listed.add(pid)
            used = process.usedGpuMemory
            sample["processes"].append(
                {
                    "pid": pid,
                    "name": _name_of(pid, inode),
                    "memory_used_mib": None if used is None else used >> 20,
                }
            )


def _inode_of(pid: int) -> int:
    """That of /proc/<pid>, which another process of the same pid does not share; 0: no such process."""
    if not 0 < pid < NO_PID:
        return 0
    try:
        return os.stat(f"/proc/{pid}").st_ino  # noqa: PTH116 - pathlib would double what a sample costs
    except OSError:
        return 0


def _name_of(pid: int, inode: int) -> str | None:
    known = _names.get(pid)
    if known and known[0] == inode:
        return known[1]
    if len(_names) >= NAMES_KEPT:
        _names.clear()
    name: str | None = ask(process_name, pid)
    _names[pid] = (inode, name)
    return name


READINGS: tuple[Call, ...] = (
    _utilization,
    _memory,
    _power,
    _power_limit,
    _temperature,
    _sm_clock,
    _memory_clock,
    _fan,
    _energy,
    _compute,
    _graphics,
)
OLDER: dict[Call, Call] = {
    _memory: _memory_v1,
    _temperature: _temperature_v1,
    _compute: _compute_v2,
    _graphics: _graphics_v2,
}
