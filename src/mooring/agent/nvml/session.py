"""NVML in this process: started, every card opened, and asked for facts, samples and events.

One `Nvml` is one initialisation of the library; after a NodeFaultError it is of no use, and neither is the
process, which keeps the old library mapped when the driver is upgraded: the parent starts a new one.
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
    judged,
    node_fault,
    number_of,
)
from mooring.agent.nvml.events import EventListener
from mooring.agent.nvml.samples import READINGS, forget_processes, sample_of
from mooring.agent.timestamps import rfc3339

UUID_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
Unreadable = dict[str, Any]


class Nvml:
    """Starts NVML and opens every card; raises NodeFaultError where that cannot be."""

    def __init__(self) -> None:
        _initialise()
        self._gpus, self._unopened = _opened()
        self._listener = EventListener(self._gpus)

    def inventory(self) -> dict[str, Any]:
        """Versions, facts of every card, and the cards that the driver counts but that cannot be read."""
        forget_processes()
        facts, unreadable = gpu_facts.read(self._gpus)
        return {**gpu_facts.versions(), "gpus": facts, "unreadable": [*self._unopened, *unreadable]}

    def sample(self) -> dict[str, Any]:
        """One reading of every card; one that is at fault is all nulls, and in `faults`."""
        at = rfc3339(time.time())
        samples = [self._sample(gpu, at) for gpu in self._gpus]
        faults = {gpu.uuid: gpu.fault for gpu in self._gpus if gpu.fault}
        return {"samples": samples, "faults": faults, **self._listener.heard()}

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
    # Three packages install a module `pynvml`; only nvidia-ml-py's is NVIDIA's, and has this.
    if not hasattr(nvml, "_nvmlGetFunctionPointer"):
        raise NodeFaultError("wrong_binding", "The installed pynvml is not that of nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except FAILURES as failure:
        raise node_fault(failure) from failure


def _opened() -> tuple[list[NvmlGpu], list[Unreadable]]:
    """The cards that open, and those that do not: the driver counts those it gives no permission for too."""
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
    """The card, or the code that says why not."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = device_uuid(handle)
    except FAILURES as failure:
        return _why(failure)
    return NvmlGpu(handle, index, uuid, READINGS) if uuid and UUID_LETTERS.issuperset(uuid) else "odd_uuid"


def _why(failure: Exception) -> str:
    try:
        judged(failure)
    except GpuFaultError as fault:
        return fault.code
    return code(number_of(failure))
