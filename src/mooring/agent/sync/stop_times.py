"""Saves when each container was sent its stop signal, for an agent that is restarted before the timeout.

A restarted agent neither sends the signal again nor restarts the timeout. The times are of the machine's
monotonic clock, which all processes share until a reboot; after a reboot none of the containers is running.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mooring.agent.sync.identity import StateDirectory

FILE: Final = "stops"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


class StopTimes:
    """The file of one node. `note` is fast; `save` waits for the disk. Any thread may call."""

    def __init__(self, state: StateDirectory, boot_id: Path = BOOT_ID) -> None:
        self._state, self._boot_id = state, boot_id
        self._writing = threading.Lock()
        self._newest: Mapping[str, float] | None = None  # None: everything noted is saved

    def load(self) -> dict[str, float]:
        """Times (`time.monotonic`) by container id; empty if the file cannot be used.

        A stop whose time is lost begins again: the program gets the signal and the whole timeout once more.
        """
        try:
            content = json.loads(self._state.read(FILE) or b"{}")
            if content.get("boot_id") != self._this_boot():
                return {}
            since = {str(container_id): float(at) for container_id, at in content["since"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            log.exception("the file %s of the data directory is damaged; stops begin again", FILE)
            return {}
        now = time.monotonic()
        return {container_id: at for container_id, at in since.items() if math.isfinite(at) and at <= now}

    def note(self, since: Mapping[str, float]) -> None:
        """Set what `save` writes."""
        self._newest = since

    def save(self) -> None:
        """Write the noted times durably. If that fails, the error is logged, and stops go on."""
        with self._writing:  # concurrent calls share one write, and never write an older state
            since, self._newest = self._newest, None
            if since is None:
                return
            try:
                content = {"boot_id": self._this_boot(), "since": dict(since)}
                self._state.write(FILE, json.dumps(content).encode())
            except OSError:
                log.exception("cannot save the times of stop signals")

    def _this_boot(self) -> str:
        return self._boot_id.read_text().strip()
