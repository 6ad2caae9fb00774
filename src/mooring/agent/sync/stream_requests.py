"""The agent's long poll for logs and exec requests of users.

It is separate from reports because users decide how often it is answered: with a full report each time, one
project could overload the node and the control plane for all others.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from mooring.agent.sync.client import ControlPlaneClient, ControlPlaneError
from mooring.agent.sync.exchange import NO_CHANGE_PAUSE_S, new_backoff
from mooring.agent.sync.identity import NodeIdentity
from mooring.schemas.agent_streams import StreamRequest, StreamRequests, StreamRequestsQuery

WAIT_S: Final = 30.0  # proxies end an idle connection after a minute

log = logging.getLogger(__name__)


class StreamRequestsCall:
    """One thread, from `start` until `ended` is set. Failed calls are retried; reports show the problem.

    Args:
        session: returns the number of the agent's session.
        serve: serves the streams of an answer, which may repeat earlier ones. Raises ControlPlaneError if
            they must not be served now.
    """

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        identity: NodeIdentity,
        session: Callable[[], int],
        serve: Callable[[Iterable[StreamRequest]], None],
        ended: threading.Event,
    ) -> None:
        self._control_plane, self._session, self._serve, self._ended = control_plane, session, serve, ended
        self._expected = (identity.control_plane_id, identity.node_id)
        self._known: list[str] = []
        self._thread = threading.Thread(target=self._run, name="stream-requests", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        backoff = new_backoff()
        while not self._ended.is_set():
            try:
                self._call()
            except ControlPlaneError as error:
                # 404: a control plane of an earlier release, which sends streams with its answers to reports.
                log.debug("no stream requests: %s", error)
                self._ended.wait(backoff.pause_s())
            except Exception:
                log.exception("cannot serve streams")
                self._ended.wait(backoff.pause_s())
            else:
                backoff.reset()

    def _call(self) -> None:
        wait_s = WAIT_S * random.uniform(0.8, 1.0)  # noqa: S311 - no secret
        query = StreamRequestsQuery(session=self._session(), wait_s=wait_s, known=self._known)
        began = time.monotonic()
        answer = self._control_plane.stream_requests(query)
        if self._ended.is_set():
            return
        self._handle(answer)
        has_new = not set(self._known) <= set(query.known)
        if not has_new and time.monotonic() - began < wait_s / 2:
            # A control plane that is shutting down answers at once.
            self._ended.wait(NO_CHANGE_PAUSE_S)

    def _handle(self, answer: StreamRequests) -> None:
        if (answer.control_plane_id, answer.node_id) != self._expected:
            raise ControlPlaneError(f"the answer is for node {answer.node_id} of {answer.control_plane_id}")
        self._serve(answer.streams)
        self._known = [each.id for each in answer.streams]
