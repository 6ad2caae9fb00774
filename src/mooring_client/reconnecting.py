"""When a client that follows a stream connects again after the connection was lost. Pure."""

import time
from collections.abc import Callable
from typing import Final

from mooring_client.errors import MooringError
from mooring_client.failures import ConnectionFailed
from mooring_client.retries import LONGEST_RETRY_AFTER_S

DEFAULT_RECONNECT_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
# Streams have a keepalive every 15 s.
SILENT_S: Final = 45.0


class Reconnecting:
    """Pauses that double while the server cannot be reached, for a limited time."""

    def __init__(self, give_up_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._give_up_after_s, self._clock = give_up_after_s, clock
        self.connected()

    def connected(self) -> None:
        """Call it whenever something has been received."""
        self._pause_s = FIRST_PAUSE_S
        self._failing_since: float | None = None

    def pause_after(self, failure: MooringError | ConnectionFailed) -> float:
        """How many seconds to wait before the next connection.

        Raises:
            MooringError, ConnectionFailed: the failure itself, if no later connection can succeed, or the
                server could not be reached for too long.
        """
        now = self._clock()
        if self._failing_since is None:
            # Since now, not since the last data: a stream may have had nothing to send for hours.
            self._failing_since = now
        is_final = isinstance(failure, MooringError) and not failure.retryable
        asked_s = (failure.retry_after_s or 0) if isinstance(failure, MooringError) else 0
        if is_final or now - self._failing_since > self._give_up_after_s or asked_s > LONGEST_RETRY_AFTER_S:
            raise failure
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return max(pause_s, asked_s)
