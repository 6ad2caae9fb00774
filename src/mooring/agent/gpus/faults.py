"""The GPU faults that a node reports. Each is sent again until a report that contains it is answered.

    fatal (core/xid.py)   an incident: the control plane quarantines the GPU
    anything else         a fault: counted, and reported at most every FAULT_PAUSE_S for each kind

A report lists incidents and faults separately, because a control plane of an earlier release quarantines a
GPU for every incident, whatever its code.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Final
from uuid import uuid4

from mooring.agent.gpus.event_ledger import Kind, kind_of
from mooring.agent.nvml.types import GpuEvent
from mooring.core import xid
from mooring.schemas.agent import Incident
from mooring_client.schemas.states import Reason

FAULT_PAUSE_S: Final = 10.0
MAX_REPORTED: Final = 1000  # the protocol's limit
# These events only say that the inventory has changed.
_NO_FAULTS: Final = frozenset({"recovery_action_changed", "mig_changed"})

log = logging.getLogger(__name__)


class GpuFaults:
    """Any thread may call; `add_events` one thread at a time.

    Args:
        recovery_of: returns the recovery action that the driver requests for a GPU; see `core/xid.py`.
    """

    def __init__(
        self, recovery_of: Callable[[str], str | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recovery_of, self._clock = recovery_of, clock
        self._lock = threading.Lock()
        self._events: tuple[GpuEvent, ...] = ()
        self._counted: dict[Kind, int] = {}
        self._incidents: dict[str, Incident] = {}
        # The prefix keeps the ids of this agent process apart from those of earlier ones.
        self._prefix, self._numbers = uuid4().hex, count(1)
        self._due: dict[Kind, Incident] = {}  # not reported yet
        self._sent: dict[Kind, Incident] = {}  # reported, and not answered
        self._sent_at: dict[Kind, float] = {}

    def add_events(self, events: tuple[GpuEvent, ...]) -> None:
        """Add the events of a reading, whose counts are totals since the reader's start."""
        if events is self._events:
            return
        before, self._counted = self._counted, {kind_of(event): event["count"] for event in events}
        self._events = events
        for event in events:
            new = event["count"] - before.get(kind_of(event), 0)
            if new and event["code"] not in _NO_FAULTS:
                self._add(event, new if new > 0 else event["count"])  # below 0: the ledger dropped its kind

    def report_incident(
        self, gpu_uuids: Iterable[str], cause: str, reason: Reason, instance_id: str | None = None
    ) -> None:
        """Report these GPUs as unusable. `cause` distinguishes incidents with the same code."""
        with self._lock:
            for uuid in gpu_uuids:
                incident_id = f"{reason.code}/{cause}/{uuid}"
                self._incidents[incident_id] = Incident(
                    id=incident_id, uuid=uuid, code=reason.code, message=reason.message,
                    instance_id=instance_id,
                )  # fmt: skip
            _drop_oldest(self._incidents)

    def incidents(self) -> list[Incident]:
        with self._lock:
            return list(self._incidents.values())

    def faults(self) -> list[Incident]:
        """The faults whose report was not answered, and then those that are due."""
        now = self._clock()
        with self._lock:
            due = [kind for kind in self._due if kind not in self._sent and self._may_send(kind, now)]
            for kind in due[: MAX_REPORTED - len(self._sent)]:
                self._sent[kind] = self._due.pop(kind)
                self._sent_at[kind] = now
            return list(self._sent.values())

    def answered(self, incidents: Iterable[Incident], faults: Iterable[Incident] = ()) -> None:
        """Forget these incidents and faults, because a report with them was answered."""
        with self._lock:
            for incident in incidents:
                self._incidents.pop(incident.id, None)
            for fault in faults:
                kind = (fault.uuid, fault.code, tuple(fault.mig_uuids))
                if kind in self._sent and self._sent[kind].id == fault.id:
                    del self._sent[kind]

    def _may_send(self, kind: Kind, now: float) -> bool:
        return kind not in self._sent_at or now - self._sent_at[kind] >= FAULT_PAUSE_S

    def _add(self, event: GpuEvent, new_count: int) -> None:
        uuid, code = event["uuid"], event["code"]
        fault = xid.classify(code, self._recovery_of(uuid) if uuid else None)
        if fault.quarantines:
            log.error("%s on GPU %s at %s: %s", code, uuid or "(unknown)", event["last_at"], fault.action)
        if uuid is None:
            return
        message = f"The driver reported {code} at {event['last_at']}: {fault.description}"
        with self._lock:
            if fault.quarantines:
                incident_id = f"{code}/{event['last_at']}/{uuid}"
                self._incidents[incident_id] = _incident(incident_id, uuid, event, new_count, message)
                _drop_oldest(self._incidents)
            else:
                kind = kind_of(event)
                due = self._due.get(kind)
                fault_id = due.id if due else f"{self._prefix}/{next(self._numbers)}"
                unreported = new_count + (due.count if due else 0)
                self._due[kind] = _incident(fault_id, uuid, event, unreported, message)
                _drop_oldest(self._due)
                _drop_oldest(self._sent_at)


def _incident(incident_id: str, uuid: str, event: GpuEvent, new_count: int, message: str) -> Incident:
    return Incident.model_validate(
        {
            "id": incident_id, "uuid": uuid, "code": event["code"], "message": message, "count": new_count,
            "at": event["last_at"], "mig_uuids": event["mig_uuids"],
        }
    )  # fmt: skip


def _drop_oldest(entries: dict[Any, Any]) -> None:
    while len(entries) > MAX_REPORTED:
        del entries[next(iter(entries))]
