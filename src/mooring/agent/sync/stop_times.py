"""When each container was sent its stop signal: remembered on disk, so that its SIGKILL outlives the agent.

A new agent neither sends the signal again nor lets the timeout begin anew. The clock is the machine's
monotonic one, which all processes of one boot share; after a reboot no container of before is running.
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
    """The file of one node. `note` is quick, `save` waits for the disk; any thread may call either."""

    def __init__(self, state: StateDirectory, boot_id: Path = BOOT_ID) -> None:
        self._state, self._boot_id = state, boot_id
        self._writing = threading.Lock()
        self._newest: Mapping[str, float] | None = None  # null: it is on disk

    def load(self) -> dict[str, float]:
        """Moments on the clock of `time.monotonic`, by container id; nothing where that cannot be told.

        A stop that is not remembered is begun anew: its program gets the signal and its whole time once more.
        """
        try:
            said = json.loads(self._state.read(FILE) or b"{}")
            if said.get("boot_id") != self._this_boot():
                return {}
            since = {str(container): float(moment) for container, moment in said["since"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            log.exception("the file %s of the data directory makes no sense; stops begin anew", FILE)
            return {}
        return {one: at for one, at in since.items() if math.isfinite(at) and at <= time.monotonic()}

    def note(self, since: Mapping[str, float]) -> None:
        """This is to be saved, in place of anything noted before."""
        self._newest = since

    def save(self) -> None:
        """What was noted is on disk when this returns. A full disk keeps nothing from being stopped."""
        with self._writing:  # many that come at once are one write, and the file never goes back
            since, self._newest = self._newest, None
            if since is None:
                return
            try:
                content = {"boot_id": self._this_boot(), "since": dict(since)}
                self._state.write(FILE, json.dumps(content).encode())
            except OSError:
                log.exception("stops under way cannot be saved")

    def _this_boot(self) -> str:
        return self._boot_id.read_text().strip()
