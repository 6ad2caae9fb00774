"""NVML in this process: initialises it, opens every GPU, and reads facts, samples and events.

One `Nvml` is one initialisation of the library. After a NodeFaultError the parent starts a new process: this
one keeps the old library mapped when the driver is upgraded.
"""

import time
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml import gpu_facts, mig
from mooring.agent.nvml.calls import (
    FAILURES,
    GpuFaultError,
    NodeFaultError,
    NvmlGpu,
    code,
    device_uuid,
    is_unsupported,
    node_fault,
    number_of,
)
from mooring.agent.nvml.events import EventListener
from mooring.agent.nvml.samples import READINGS, forget_processes, sample_of
from mooring.agent.timestamps import rfc3339

UUID_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
Unreadable = dict[str, Any]


class Nvml:
    """Initialises NVML and opens every GPU. Raises NodeFaultError if that fails."""

    def __init__(self) -> None:
        _initialise()
        self._gpus, self._unopened = _open_all()
        self._listener = EventListener(self._gpus)

    def inventory(self) -> dict[str, Any]:
        """Versions, facts of every GPU, and the GPUs that the driver counts but that cannot be read."""
        forget_processes()
        facts, unreadable = gpu_facts.read(self._gpus)
        return {**gpu_facts.versions(), "gpus": facts, "unreadable": [*self._unopened, *unreadable]}

    def sample(self) -> dict[str, Any]:
        """One sample of every GPU. `faults` has the code of each GPU that could not be read."""
        at = rfc3339(time.time())
        samples = [self._sample(gpu, at) for gpu in self._gpus]
        faults = {gpu.uuid: gpu.fault for gpu in self._gpus if gpu.fault}
        return {"samples": samples, "faults": faults, **self._listener.drain()}

    @staticmethod
    def _sample(gpu: NvmlGpu, at: str) -> dict[str, Any]:
        sample = sample_of(gpu, at)
        if gpu.fault is None:
            try:
                mig.add_to(sample, gpu)
            except GpuFaultError as fault:
                gpu.fault = fault.code
        return sample


def _initialise() -> None:
    # Three packages install a module `pynvml`; only nvidia-ml-py, NVIDIA's own, has this function.
    if not hasattr(nvml, "_nvmlGetFunctionPointer"):
        raise NodeFaultError("wrong_binding", "The installed pynvml is not that of nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except FAILURES as failure:
        raise node_fault(failure) from failure


def _open_all() -> tuple[list[NvmlGpu], list[Unreadable]]:
    """The GPUs, and those that do not open: the driver also counts GPUs that this process may not open."""
    gpus: list[NvmlGpu] = []
    unopened: list[Unreadable] = []
    for index in range(_count()):
        gpu = _open(index)
        if isinstance(gpu, NvmlGpu):
            gpus.append(gpu)
        else:
            unopened.append({"index": index, "uuid": None, "code": gpu})
    return gpus, unopened


def _count() -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except FAILURES as failure:
        raise node_fault(failure) from failure


def _open(index: int) -> NvmlGpu | str:
    """The GPU, or the code of the failure."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = device_uuid(handle)
    except FAILURES as failure:
        return _failure_code(failure)
    return NvmlGpu(handle, index, uuid, READINGS) if uuid and UUID_LETTERS.issuperset(uuid) else "odd_uuid"


def _failure_code(failure: Exception) -> str:
    try:
        is_unsupported(failure)
    except GpuFaultError as fault:
        return fault.code
    return code(number_of(failure))
