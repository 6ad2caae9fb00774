"""Asks the control plane for what one attempt is started with, at the moment of its start (R16, R17)."""

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
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment, StartSecrets

# A start that fails is tried again for as long as the control plane lets it, and a new password counts then.
KEPT_S: Final = 600.0

DELAYED: Final = Reason(
    code="waiting_for_secrets",
    message="The node cannot fetch the instance's secrets from the control plane; it is tried again",
)
REFUSED: Final = Reason(
    code="secrets_refused",
    message="The control plane does not give the node secrets for this attempt; restart the instance",
)


class StartSecretsOf:
    """Equips assignments with their secrets. They are kept in memory, while the start is tried.

    Args:
        session: the number of the agent's present session.
    """

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        session: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control_plane, self._session, self._clock = control_plane, session, clock
        self._kept: dict[Key, tuple[float, StartSecrets]] = {}
        self._lock = threading.Lock()  # of `_kept`

    def equip(self, assignment: Assignment) -> Assignment:
        """The assignment with what it is started with.

        Raises:
            StartDelayed: the control plane does not answer.
            StartRefused: it says no.
        """
        if not assignment.asks_for_secrets:
            return assignment
        given = self._given(assignment)
        return assignment.model_copy(update={"secrets": given.secrets, "registry": given.registry})

    def forget(self, key: Key) -> None:
        """It has started, or will not be started any more."""
        with self._lock:
            self._kept.pop(key, None)

    def _given(self, assignment: Assignment) -> StartSecrets:
        key, now = key_of(assignment), self._clock()
        with self._lock:
            self._kept = {each: kept for each, kept in self._kept.items() if now - kept[0] < KEPT_S}
            if key in self._kept:
                return self._kept[key][1]
        given = self._ask(key)
        with self._lock:
            self._kept[key] = now, given
        return given

    def _ask(self, key: Key) -> StartSecrets:
        try:
            return self._control_plane.start_secrets(*key, session=self._session())
        except (SessionTaken, CredentialRejected) as error:
            raise StartDelayed(DELAYED) from error  # this agent ends, and another one decides
        except RequestRejected as error:
            raise StartRefused(REFUSED) from error
        except ControlPlaneError as error:
            raise StartDelayed(DELAYED) from error
