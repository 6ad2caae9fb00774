"""Refused requests for the audit log: counted in memory, recorded once a minute in a bounded number of rows.

One row each would let whoever is refused fill the log, which nobody may empty. What is counted is lost when
the process dies within that minute.
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
# In a minute: so many callers have a row of their own, and so many names are told in each.
MOST_CALLERS: Final = 20
MOST_NAMES: Final = 20
_OTHERS: Final = "others"
_ANYBODY: Final = Caller("anybody", "system", "who had no valid credential")
_MANY: Final = Caller("many", "system", "further callers")


@dataclass(slots=True)
class _Refused:
    """What one caller was refused."""

    caller: Caller
    action: str
    names: Counter[str] = field(default_factory=Counter)

    def add(self, name: str) -> None:
        self.names[name if name in self.names or len(self.names) < MOST_NAMES else _OTHERS] += 1

    def after(self) -> dict[str, Any]:
        counted = "operations" if self.action == FORBIDDEN else "addresses"
        return {"refused": self.names.total(), counted: dict(self.names)}


class RejectedRequests:
    """The refusals of this replica since they were last recorded."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._refused: dict[str, _Refused] = {}

    def forbidden(self, caller: Caller, operation: str) -> None:
        """A known caller was refused an operation."""
        with self._lock:
            if caller.id not in self._refused and len(self._refused) >= MOST_CALLERS:
                caller = _MANY
            self._refused.setdefault(caller.id, _Refused(caller, FORBIDDEN)).add(operation)

    def unauthorized(self, address: str | None) -> None:
        """Somebody without a valid credential was refused."""
        with self._lock:
            self._refused.setdefault(_ANYBODY.id, _Refused(_ANYBODY, UNAUTHORIZED)).add(address or "unknown")

    def take(self) -> list[_Refused]:
        """What is to be recorded now; from here on it is counted anew."""
        with self._lock:
            taken, self._refused = list(self._refused.values()), {}
        return taken


def record(session: Session, refused: list[_Refused]) -> None:
    for one in refused:
        access = Access(one.caller, Permission.READ, one.action)
        audit_log.record(session, access, None, None, after=one.after())
