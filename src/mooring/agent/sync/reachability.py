"""One log line when the control plane becomes unreachable, and one when all nodes reach it again."""

import logging
import threading

log = logging.getLogger(__name__)


class Reachability:
    """Shared by all nodes of a process. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def failed(self, node: str, error: Exception) -> None:
        """A call of this node failed and will be retried."""
        with self._lock:
            if not self._failing:
                log.warning("cannot reach the control plane (%s); containers keep running, retrying", error)
            self._failing.add(node)

    def succeeded(self, node: str) -> None:
        """A call of this node was answered."""
        if node not in self._failing:  # without the lock: the usual case, several times a second
            return
        with self._lock:
            self._failing.discard(node)
            if not self._failing:
                log.info("the control plane is reachable again")
