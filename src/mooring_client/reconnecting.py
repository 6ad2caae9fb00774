"""When a client that follows a stream connects again after the connection was lost. Pure."""

import time
from collections.abc import Callable
from typing import Final

from mooring_client.errors import MooringError
from mooring_client.failures import ConnectionFailed

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
        self._since = self._clock()

    def pause_after(self, failure: MooringError | ConnectionFailed) -> float:
        """How many seconds to wait before the next connection.

        Raises:
            MooringError, ConnectionFailed: the failure itself, if no later connection can succeed, or the
                server could not be reached for too long.
        """
        is_final = isinstance(failure, MooringError) and not failure.retryable
        if is_final or self._clock() - self._since > self._give_up_after_s:
            raise failure
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        asked_s = failure.retry_after_s if isinstance(failure, MooringError) else None
        return max(pause_s, asked_s or 0)
