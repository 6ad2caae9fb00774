"""Which requests are repeated, and when. Pure; `aio` and `sync` wait and send."""

import random
from collections.abc import Callable
from typing import Final

from mooring_client.errors import IdempotencyInProgress, MooringError
from mooring_client.failures import ConnectionFailed

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 8.0
# A longer Retry-After is for the user to decide on: a quota that is reset at midnight, for example.
LONGEST_RETRY_AFTER_S: Final = 60


class Attempts:
    """The attempts of one request.

    Every attempt is safe to repeat: a POST has an `Idempotency-Key`, so the server carries it out once and
    answers the repetition as it answered the first.

    Attributes:
        may_have_taken_effect: whether an earlier attempt may have, because its answer was lost.
    """

    def __init__(self, max_retries: int, jitter: Callable[[], float] = random.random) -> None:
        self._left = max_retries
        self._pause_s = FIRST_PAUSE_S
        self._jitter = jitter
        self.may_have_taken_effect = False

    def pause_after(self, failure: MooringError | ConnectionFailed) -> float:
        """How many seconds to wait before the next attempt.

        Raises:
            MooringError, ConnectionFailed: the failure itself, if it is final.
        """
        if isinstance(failure, MooringError):
            failure.repeated = self.may_have_taken_effect
        else:
            self.may_have_taken_effect |= failure.may_have_taken_effect
        if self._left == 0 or not _may_pass(failure):
            raise failure
        self._left -= 1
        pause_s = self._pause_s * (0.5 + self._jitter() / 2)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        asked_s = failure.retry_after_s if isinstance(failure, MooringError) else None
        if asked_s is None:
            return pause_s
        if asked_s > LONGEST_RETRY_AFTER_S:
            raise failure
        # Not all clients come back at the same time.
        return asked_s + pause_s


def _may_pass(failure: MooringError | ConnectionFailed) -> bool:
    """Whether the same request may soon succeed. A conflict with other users' work lasts longer than that."""
    if isinstance(failure, ConnectionFailed):
        return True
    if failure.status == 409:
        return isinstance(failure, IdempotencyInProgress)
    return failure.retryable
