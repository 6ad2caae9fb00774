"""Reads that the audit log tells of: exports of the log, and logs that admins read in projects of others.

Each caller's reading of one thing is recorded once in ten minutes, or readers could fill a log that nobody
may empty.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, Final

from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.core.access import Access

READ_LOGS: Final = "instance.read_logs"
EXPORT: Final = "audit.export"
REPEATED_AFTER_S: Final = 600.0
_MOST_KEPT: Final = 10_000


class AuditedReads:
    """Which reads this replica has recorded lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._recorded: OrderedDict[tuple[str, ...], float] = OrderedDict()

    def record(
        self,
        session: Session,
        access: Access,
        action: str,
        target_id: str | None,
        project_id: str | None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the read, unless it was a moment ago."""
        if self._is_new(access.caller.id, action, target_id or "", project_id or "", repr(after)):
            audit_log.record(session, replace(access, action=action), target_id, project_id, after=after)

    def _is_new(self, *read: str) -> bool:
        now = self._clock()
        with self._lock:
            last = self._recorded.pop(read, None)
            is_new = last is None or now - last >= REPEATED_AFTER_S
            self._recorded[read] = now if last is None or is_new else last
            while len(self._recorded) > _MOST_KEPT:
                self._recorded.popitem(last=False)
        return is_new


def is_of_others(access: Access, project_id: str) -> bool:
    """Whether an admin looks into a project without being a member of it."""
    return access.caller.is_admin and project_id not in access.caller.permissions
