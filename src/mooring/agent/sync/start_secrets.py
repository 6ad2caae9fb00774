"""Fetches the secrets of an attempt from the control plane when it is started (R16, R17)."""

import threading
import time
from collections.abc import Callable
from typing import Final

from mooring.agent.decide.reconcile import key_of
from mooring.agent.decide.snapshot import Key
from mooring.agent.runtime import StartDelayed, StartRefused
from mooring.agent.sync.client import (
    ControlPlaneClient,
    ControlPlaneError,
    CredentialRejected,
    RequestRejected,
    SessionTaken,
)
from mooring.schemas.agent import Assignment, StartSecrets
from mooring_client.schemas.states import Reason

# How long retries of a start use the same secrets. A changed registry password takes effect after that.
CACHE_S: Final = 600.0

DELAYED: Final = Reason(
    code="waiting_for_secrets",
    message="The node cannot fetch the instance's secrets from the control plane; it retries",
)
REFUSED: Final = Reason(
    code="secrets_refused",
    message="The control plane denies the node the secrets of this attempt; restart the instance",
)


class StartSecretsCache:
    """Adds secrets to assignments, and caches them in memory, until the start succeeds or fails for good.

    Args:
        session: returns the number of the agent's session.
    """

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        session: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control_plane, self._session, self._clock = control_plane, session, clock
        self._cache: dict[Key, tuple[float, StartSecrets]] = {}
        self._lock = threading.Lock()  # of `_cache`

    def equip(self, assignment: Assignment) -> Assignment:
        """The assignment with its secrets and registry credentials.

        Raises:
            StartDelayed: the control plane does not answer, or this agent has been replaced.
            StartRefused: the control plane rejects the request.
        """
        if not assignment.asks_for_secrets:
            return assignment
        fetched = self._cached_or_fetched(assignment)
        return assignment.model_copy(update={"secrets": fetched.secrets, "registry": fetched.registry})

    def forget(self, key: Key) -> None:
        """The start has succeeded, or failed for good."""
        with self._lock:
            self._cache.pop(key, None)

    def _cached_or_fetched(self, assignment: Assignment) -> StartSecrets:
        key, now = key_of(assignment), self._clock()
        with self._lock:
            self._cache = {each: entry for each, entry in self._cache.items() if now - entry[0] < CACHE_S}
            if key in self._cache:
                return self._cache[key][1]
        fetched = self._fetch(key)
        with self._lock:
            self._cache[key] = now, fetched
        return fetched

    def _fetch(self, key: Key) -> StartSecrets:
        try:
            return self._control_plane.start_secrets(*key, session=self._session())
        except (SessionTaken, CredentialRejected) as error:
            raise StartDelayed(DELAYED) from error  # this agent is about to end
        except RequestRejected as error:
            raise StartRefused(REFUSED) from error
        except ControlPlaneError as error:
            raise StartDelayed(DELAYED) from error
