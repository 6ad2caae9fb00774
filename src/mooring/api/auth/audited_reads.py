"""Reads that the audit log records: its exports, and instance logs that admins read as non-members.

Repeated reads of a resource by one caller are recorded once in ten minutes. The audit log is never purged, so
readers must not be able to fill it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, Final

from cachetools import TTLCache
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.core.access import Access

READ_LOGS: Final = "instance.read_logs"
EXPORT: Final = "audit.export"
RECORD_INTERVAL_S: Final = 600.0
_MAX_REMEMBERED: Final = 10_000


class AuditedReads:
    """The reads that this replica has recorded recently."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = Lock()
        self._recorded: TTLCache[tuple[str, ...], bool] = TTLCache(_MAX_REMEMBERED, RECORD_INTERVAL_S, clock)

    def record(
        self,
        session: Session,
        access: Access,
        action: str,
        target_id: str | None,
        project_id: str | None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the read unless the same one was recorded within RECORD_INTERVAL_S."""
        if self._is_new(access.caller.id, action, target_id or "", project_id or "", repr(after)):
            audit_log.record(session, replace(access, action=action), target_id, project_id, after=after)

    def _is_new(self, *read: str) -> bool:
        with self._lock:
            is_new = read not in self._recorded
            self._recorded.setdefault(read, True)
        return is_new


def is_outside_admin(access: Access, project_id: str) -> bool:
    """Whether the caller is an admin who is not a member of the project."""
    return access.caller.is_admin and project_id not in access.caller.permissions
