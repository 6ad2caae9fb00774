"""When this node must stop its replaceable instances, because it has had no contact with the control plane.

The control plane starts them on another node when it has not heard of this one for longer. A restart of the
agent must not extend the time, so the last contact is kept in a file. The clock is CLOCK_BOOTTIME, which goes
on while the machine is suspended; after a reboot none of the containers is running.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from mooring.agent.sync.identity import StateDirectory
from mooring.agent.sync.stop_times import BOOT_ID

FILE: Final = "contact"
# The file may be older than the last contact by this much; the fence then begins earlier, never later.
_SAVE_EVERY_S: Final = 10.0

log = logging.getLogger(__name__)


def boot_time() -> float:
    """Seconds since the machine was started, including the time in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SelfFence:
    """Of one node. Any thread may call.

    Until the control plane has named a time, as those of earlier releases never do, there is no fence.
    """

    def __init__(self, state: StateDirectory, clock: Callable[[], float] = boot_time) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.Lock()  # of everything below
        self._contact_at, self._after_s = self._load()
        self._saved_at = self._contact_at if self._after_s is not None else -math.inf

    def now(self) -> float:
        """The time to pass to `heard`, taken before the request is sent."""
        return self._clock()

    def heard(self, sent_at: float, after_s: float | None) -> None:
        """The control plane has answered a report that was sent at this time.

        Args:
            after_s: after how long without an answer to stop; None: never.
        """
        with self._lock:
            self._contact_at = max(self._contact_at, sent_at)
            is_due = after_s != self._after_s or self._contact_at >= self._saved_at + _SAVE_EVERY_S
            self._after_s = after_s
            if is_due:
                self._save()

    def due_in_s(self) -> float:
        """Seconds until the fence begins, at most 0 if it has begun; infinite if there is none."""
        with self._lock:
            if self._after_s is None:
                return math.inf
            return self._contact_at + self._after_s - self._clock()

    def _load(self) -> tuple[float, float | None]:
        """The last contact, and after how long the fence begins."""
        try:
            content = json.loads(self._state.read(FILE) or b"{}")
            if content.get("boot_id") == BOOT_ID.read_text().strip() and content["after_s"] is not None:
                at, after_s = float(content["at"]), float(content["after_s"])
                if math.isfinite(at) and math.isfinite(after_s):
                    return min(at, self._clock()), after_s
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            log.exception("the file %s of the data directory is damaged", FILE)
        return -math.inf, None

    def _save(self) -> None:
        content = {"boot_id": BOOT_ID.read_text().strip(), "at": self._contact_at, "after_s": self._after_s}
        try:
            self._state.write(FILE, json.dumps(content).encode())
        except OSError:
            log.exception("cannot save the time of the last contact")
        else:
            self._saved_at = self._contact_at
