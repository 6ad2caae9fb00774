"""XID errors as the driver announces them; what happened before this listens is not announced.

The wait has a thread of its own (ctypes lets go of the interpreter meanwhile), so it delays no sample.
"""

import threading
import time
from collections import deque
from ctypes import c_void_p, cast
from typing import Any

import pynvml as nvml  # type: ignore[import-untyped]

from mooring.agent.nvml_calls import FAILURES, Gpu, ask, number_of
from mooring.agent.timestamps import rfc3339

WAIT_MS = 5000
KEPT = 256


class XidListener:
    """Listens from the moment it is made, for as long as the process lives."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self._uuids = {_address(gpu.handle): gpu.uuid for gpu in gpus}
        self._waiting: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._deaf = False
        events = _registered(gpus)
        if events is not None:
            threading.Thread(target=self._listen, args=(events,), name="xids", daemon=True).start()

    def heard(self) -> dict[str, Any]:
        """The XIDs since the last call. `deaf`: the driver failed the wait, so any card may be at fault."""
        xids = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return {"xids": xids, "deaf": self._deaf}

    def _listen(self, events: Any) -> None:
        while not self._deaf:
            try:
                self._note(nvml.nvmlEventSetWait_v2(events, WAIT_MS))
            except FAILURES as failure:
                self._deaf = number_of(failure) != nvml.NVML_ERROR_TIMEOUT

    def _note(self, event: Any) -> None:
        """A MIG slice's XID goes under its card: it can be every slice's trouble."""
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            uuid = self._uuids.get(_address(event.device))
            self._waiting.append({"uuid": uuid, "xid": event.eventData, "at": rfc3339(time.time())})


def _registered(gpus: list[Gpu]) -> Any:
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


def _register(gpu: Gpu, events: Any) -> int:
    """NVML's number for how it went; NOT_SUPPORTED, and others, leave the set usable."""
    try:
        supported = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle)
        if not supported & nvml.nvmlEventTypeXidCriticalError:
            return int(nvml.NVML_ERROR_NOT_SUPPORTED)
        nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except FAILURES as failure:
        return number_of(failure)
    return int(nvml.NVML_SUCCESS)


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value
