"""Collects GPU events from the driver. Events before the listener was created are not delivered.

The wait runs in its own thread (ctypes releases the GIL), so it delays no sample. Equal events are counted,
not stored: a program that faults thousands of times a second can neither fill memory nor displace a hardware
event.
"""

import threading
import time
from ctypes import c_void_p, cast
from typing import Any, Final

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml import mig
from mooring.agent.nvml.calls import FAILURES, NvmlGpu, ask, number_of
from mooring.agent.timestamps import rfc3339

WAIT_MS: Final = 5000
MAX_KINDS: Final = 8192  # different events between two calls of `drain`

XID: Final = nvml.nvmlEventTypeXidCriticalError
# core/xid.py describes these codes, but not the last two, which only say that the inventory has changed.
CODES: Final = {
    nvml.nvmlEventTypeGpuUnavailableError: "gpu_unavailable",
    nvml.nvmlEventTypeFatalPoisonError: "fatal_poison",
    nvml.nvmlEventTypeNonFatalPoisonError: "nonfatal_poison",
    nvml.nvmlEventTypeDramRetirementEvent: "dram_retirement",
    nvml.nvmlEventTypeDramRetirementFailure: "dram_retirement_failure",
    nvml.nvmlEventTypeSingleBitEccErrorStorm: "ecc_error_storm",
    nvml.nvmlEventTypeGpuRecoveryAction: "recovery_action_changed",
    nvml.nvmlEventMigConfigChange: "mig_changed",
}
WANTED: Final = XID | sum(CODES)

# Address of the GPU's handle, code, GPU instance and compute instance.
_Kind = tuple[int | None, str, int, int]


class EventListener:
    """Listens from its creation until the process ends."""

    def __init__(self, gpus: list[NvmlGpu]) -> None:
        self._gpus = {_address(gpu.handle): gpu for gpu in gpus}
        self._lock = threading.Lock()
        self._counted: dict[_Kind, dict[str, Any]] = {}
        self._deaf = False
        events = _event_set(gpus)
        if events is not None:
            threading.Thread(target=self._listen, args=(events,), name="gpu-events", daemon=True).start()

    def drain(self) -> dict[str, Any]:
        """The events since the last call. `deaf`: waiting for events failed, so any GPU may have a fault."""
        with self._lock:
            counted, self._counted = self._counted, {}
        return {"events": [self._event(kind, seen) for kind, seen in counted.items()], "deaf": self._deaf}

    def _listen(self, events: Any) -> None:
        while not self._deaf:
            try:
                self._count(nvml.nvmlEventSetWait_v2(events, WAIT_MS))
            except FAILURES as failure:
                self._deaf = number_of(failure) != nvml.NVML_ERROR_TIMEOUT

    def _count(self, event: Any) -> None:
        code = f"xid_{event.eventData}" if event.eventType == XID else CODES.get(event.eventType)
        if code is None:
            return
        kind = (_address(event.device), code, event.gpuInstanceId, event.computeInstanceId)
        at = rfc3339(time.time())
        with self._lock:
            if kind in self._counted:
                self._counted[kind]["count"] += 1
                self._counted[kind]["last_at"] = at
            elif len(self._counted) < MAX_KINDS:
                self._counted[kind] = {"count": 1, "first_at": at, "last_at": at}

    def _event(self, kind: _Kind, seen: dict[str, Any]) -> dict[str, Any]:
        """A `types.GpuEvent` for the events of one kind. `seen`: their count, and the first and last time."""
        address, code, gpu_instance, compute_instance = kind
        gpu = self._gpus.get(address)
        return {
            "uuid": gpu.uuid if gpu else None,
            "code": code,
            "mig_uuids": mig.uuids_at(gpu, gpu_instance, compute_instance) if gpu else [],
            **seen,
        }


def _event_set(gpus: list[NvmlGpu]) -> Any:
    """An event set with all GPUs that support events; None: there are no such GPUs, or no event sets."""
    events = ask(nvml.nvmlEventSetCreate)
    if events is None:
        return None
    outcomes = []
    for gpu in gpus:
        outcomes.append(_register(gpu, events))
        if outcomes[-1] == nvml.NVML_ERROR_UNKNOWN:  # the set is undefined now and can only be freed
            ask(nvml.nvmlEventSetFree, events)
            return _event_set([other for other in gpus if other is not gpu])
    if nvml.NVML_SUCCESS in outcomes:
        return events
    ask(nvml.nvmlEventSetFree, events)
    return None


def _register(gpu: NvmlGpu, events: Any) -> int:
    """NVML's return code. After all codes but NVML_ERROR_UNKNOWN the set is still usable."""
    try:
        wanted = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & WANTED
        if not wanted:
            return int(nvml.NVML_ERROR_NOT_SUPPORTED)
        nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted, events)
    except FAILURES as failure:
        return number_of(failure)
    return int(nvml.NVML_SUCCESS)


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value
