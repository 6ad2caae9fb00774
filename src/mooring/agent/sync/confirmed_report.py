"""Decides when a heartbeat replaces a report: nothing has changed since a report that was confirmed."""

import random
import threading
import time
from dataclasses import dataclass
from typing import Final

from mooring.schemas.agent import Heartbeat, SyncAnswer, SyncRequest

# Nothing depends on this: a report that should change nothing is sent from time to time.
REPORT_EVERY_S: Final = 300.0
# Fields that differ between two reports of the same state.
_OF_THE_CALL: Final = {"seq", "wait_s", "brief", "samples"}


@dataclass(frozen=True, slots=True)
class _Confirmed:
    report: SyncRequest
    revision: int
    until: float  # on the monotonic clock


class ConfirmedReport:
    """The last confirmed report of a node. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._confirmed: _Confirmed | None = None

    def confirmed(self, report: SyncRequest, answer: SyncAnswer) -> None:
        """Heartbeats may refer to this report from now on, unless a newer one was confirmed."""
        until = time.monotonic() + REPORT_EVERY_S * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        with self._lock:
            last = self._confirmed.report if self._confirmed else None
            if last is not None and (last.session, last.seq) > (report.session, report.seq):
                return
            self._confirmed = None
            # A brief answer lacks the removals of containers that this report lists for the first time: the
            # poll task must report once more to get them. An incident is reported until it is answered, so
            # the next report lacks it.
            has_all = not answer.brief and not report.incidents and not report.faults
            if answer.revision is not None and has_all:
                self._confirmed = _Confirmed(report, answer.revision, until)

    def instead_of(self, report: SyncRequest) -> Heartbeat | None:
        """The heartbeat to send instead of this report; None: send the report."""
        with self._lock:
            confirmed = self._confirmed
        if confirmed is None or time.monotonic() > confirmed.until or not _is_same(confirmed.report, report):
            return None
        return Heartbeat(
            session=report.session,
            seq=confirmed.report.seq,
            generation=report.generation,
            revision=confirmed.revision,
            wait_s=report.wait_s,
            samples=report.samples,
        )

    def forget(self) -> None:
        """The next call must be a report."""
        with self._lock:
            self._confirmed = None


def _is_same(confirmed: SyncRequest, report: SyncRequest) -> bool:
    return all(
        getattr(confirmed, name) == getattr(report, name)
        for name in SyncRequest.model_fields
        if name not in _OF_THE_CALL
    )
