"""One log line when the control plane becomes unreachable, and one when all nodes reach it again."""

import logging
import threading
import time

log = logging.getLogger(__name__)


class Reachability:
    """Shared by all nodes of a process. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed_at: dict[str, float] = {}  # by node, on the monotonic clock

    def failed(self, node: str, error: Exception) -> None:
        """A call of this node failed and will be retried."""
        with self._lock:
            if not self._failed_at:
                log.warning("cannot reach the control plane (%s); containers keep running, retrying", error)
            self._failed_at[node] = time.monotonic()

    def succeeded(self, node: str, sent_at: float) -> None:
        """A call of this node, sent at this time, was answered. It may be older than a call that failed."""
        if node not in self._failed_at:  # without the lock: the usual case, several times a second
            return
        with self._lock:
            if sent_at <= self._failed_at.get(node, sent_at):
                return
            del self._failed_at[node]
            if not self._failed_at:
                log.info("the control plane is reachable again")
