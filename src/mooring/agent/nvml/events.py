"""GPU events as the driver announces them; what happened before this listens is not announced.

The wait has a thread of its own (ctypes lets go of the interpreter meanwhile), so it delays no sample. Equal
events are counted, not kept: a program that faults thousands of times a second can neither fill the memory
nor push out the one event of the hardware that matters.
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
KINDS_KEPT: Final = 8192  # different events between two calls of `heard`

XID: Final = nvml.nvmlEventTypeXidCriticalError
# core/xid.py has the same codes. The last two say that the inventory is out of date, and nothing else.
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

# Handle, code, GPU instance and compute instance.
_Kind = tuple[int | None, str, int, int]


class EventListener:
    """Listens from the moment it is made, for as long as the process lives."""

    def __init__(self, gpus: list[NvmlGpu]) -> None:
        self._gpus = {_address(gpu.handle): gpu for gpu in gpus}
        self._lock = threading.Lock()
        self._counted: dict[_Kind, dict[str, Any]] = {}
        self._deaf = False
        events = _registered(gpus)
        if events is not None:
            threading.Thread(target=self._listen, args=(events,), name="gpu-events", daemon=True).start()

    def heard(self) -> dict[str, Any]:
        """The events since the last call. `deaf`: the driver failed the wait, so any card may be at fault."""
        with self._lock:
            counted, self._counted = self._counted, {}
        return {"events": [self._told(kind, found) for kind, found in counted.items()], "deaf": self._deaf}

    def _listen(self, events: Any) -> None:
        while not self._deaf:
            try:
                self._note(nvml.nvmlEventSetWait_v2(events, WAIT_MS))
            except FAILURES as failure:
                self._deaf = number_of(failure) != nvml.NVML_ERROR_TIMEOUT

    def _note(self, event: Any) -> None:
        code = f"xid_{event.eventData}" if event.eventType == XID else CODES.get(event.eventType)
        if code is None:
            return
        kind = (_address(event.device), code, event.gpuInstanceId, event.computeInstanceId)
        at = rfc3339(time.time())
        with self._lock:
            if kind in self._counted:
                self._counted[kind]["count"] += 1
                self._counted[kind]["last_at"] = at
            elif len(self._counted) < KINDS_KEPT:
                self._counted[kind] = {"count": 1, "first_at": at, "last_at": at}

    def _told(self, kind: _Kind, found: dict[str, Any]) -> dict[str, Any]:
        """A fault of a MIG device names it; a null UUID may be any card of the node."""
        address, code, gpu_instance, compute_instance = kind
        gpu = self._gpus.get(address)
        return {
            "uuid": gpu.uuid if gpu else None,
            "code": code,
            "mig_uuids": mig.uuids_at(gpu, gpu_instance, compute_instance) if gpu else [],
            **found,
        }


def _registered(gpus: list[NvmlGpu]) -> Any:
    """An event set that hears every card which can be heard; None: no card can."""
    events = ask(nvml.nvmlEventSetCreate)
    if events is None:
        return None
    outcomes = []
    for gpu in gpus:
        outcomes.append(_register(gpu, events))
        if outcomes[-1] == nvml.NVML_ERROR_UNKNOWN:  # leaves the set undefined: only good for freeing
            ask(nvml.nvmlEventSetFree, events)
            return _registered([other for other in gpus if other is not gpu])
    if nvml.NVML_SUCCESS in outcomes:
        return events
    ask(nvml.nvmlEventSetFree, events)
    return None


def _register(gpu: NvmlGpu, events: Any) -> int:
    """NVML's number for how it went; NOT_SUPPORTED, and others, leave the set usable."""
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
