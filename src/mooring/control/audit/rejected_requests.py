"""Rejected requests (401, 403): counted in memory, recorded in the audit log once a minute in a few rows.

One row for each would let a rejected caller fill the log, which is never purged. If the process dies, the
counts of the last minute are lost.
"""

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.core.access import Access, Caller, Permission

FORBIDDEN: Final = "access.forbidden"
UNAUTHORIZED: Final = "access.unauthorized"
# Limits per minute: callers with a row of their own, and operations or addresses listed in each row.
MAX_CALLERS: Final = 20
MAX_NAMES: Final = 20
_OTHERS: Final = "others"
_ANYBODY: Final = Caller("anybody", "system", "who had no valid credential")
_MANY: Final = Caller("many", "system", "further callers")


@dataclass(slots=True)
class _Rejections:
    """The rejected requests of one caller."""

    caller: Caller
    action: str
    names: Counter[str] = field(default_factory=Counter)

    def add(self, name: str) -> None:
        self.names[name if name in self.names or len(self.names) < MAX_NAMES else _OTHERS] += 1

    def after(self) -> dict[str, Any]:
        counted = "operations" if self.action == FORBIDDEN else "addresses"
        return {"refused": self.names.total(), counted: dict(self.names)}


class RejectedRequests:
    """The rejected requests of this replica since the last recording."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rejected: dict[str, _Rejections] = {}

    def forbidden(self, caller: Caller, operation: str) -> None:
        """Count a request of a known caller who lacks the permission."""
        with self._lock:
            if caller.id not in self._rejected and len(self._rejected) >= MAX_CALLERS:
                caller = _MANY
            self._rejected.setdefault(caller.id, _Rejections(caller, FORBIDDEN)).add(operation)

    def unauthorized(self, address: str | None) -> None:
        """Count a request without a valid credential."""
        with self._lock:
            self._rejected.setdefault(_ANYBODY.id, _Rejections(_ANYBODY, UNAUTHORIZED)).add(
                address or "unknown"
            )

    def take(self) -> list[_Rejections]:
        """Return the counts for recording, and reset them."""
        with self._lock:
            taken, self._rejected = list(self._rejected.values()), {}
        return taken


def record(session: Session, rejected: list[_Rejections]) -> None:
    for each in rejected:
        access = Access(each.caller, Permission.READ, each.action)
        audit_log.record(session, access, None, None, after=each.after())
