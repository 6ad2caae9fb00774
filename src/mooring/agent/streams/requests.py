"""The agent's long poll for logs and exec requests of users.

It is separate from reports because users decide how often it is answered: with a full report each time, one
project could overload the node and the control plane for all others.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Final

from mooring.agent.sync.client import ControlPlaneClient, ControlPlaneError, stream_requests_call
from mooring.agent.sync.exchange import NO_CHANGE_PAUSE_S, new_backoff
from mooring.agent.sync.identity import NodeIdentity
from mooring.agent.sync.tasks import Signal, Tasks
from mooring.schemas.agent_streams import StreamRequest, StreamRequests, StreamRequestsQuery

WAIT_S: Final = 50.0  # proxies end an idle connection after a minute

log = logging.getLogger(__name__)


class StreamRequestsCall:
    """One task, from `start` until `ended` is set. Failed calls are retried; reports show the problem.

    Args:
        session: returns the number of the agent's session.
        serve: serves the streams of an answer, which may repeat earlier ones. Raises ControlPlaneError if
            they must not be served now.
    """

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        tasks: Tasks,
        identity: NodeIdentity,
        session: Callable[[], int],
        serve: Callable[[Iterable[StreamRequest]], None],
        ended: Signal,
    ) -> None:
        self._control_plane, self._tasks = control_plane, tasks
        self._session, self._serve, self._ended = session, serve, ended
        self._expected = (identity.control_plane_id, identity.node_id)
        self._known: list[str] = []

    def start(self) -> None:
        self._tasks.start(self._run, "stream-requests")

    async def _run(self) -> None:
        backoff = new_backoff()
        while not self._ended.is_set():
            try:
                await self._call()
            except ControlPlaneError as error:
                # 404: a control plane of an earlier release, which sends streams with its answers to reports.
                log.debug("no stream requests: %s", error)
                await self._ended.wait(backoff.pause_s())
            except Exception:
                log.exception("cannot serve streams")
                await self._ended.wait(backoff.pause_s())
            else:
                backoff.reset()

    async def _call(self) -> None:
        wait_s = WAIT_S * random.uniform(0.8, 1.0)  # noqa: S311 - no secret
        query = StreamRequestsQuery(session=self._session(), wait_s=wait_s, known=self._known)
        began = time.monotonic()
        answer = await self._control_plane.awaited(stream_requests_call(query))
        if self._ended.is_set():
            return
        await self._tasks.call(lambda: self._handle(answer))
        has_new = not set(self._known) <= set(query.known)
        if not has_new and time.monotonic() - began < wait_s / 2:
            # A control plane that is shutting down answers at once.
            await self._ended.wait(NO_CHANGE_PAUSE_S)

    def _handle(self, answer: StreamRequests) -> None:
        if (answer.control_plane_id, answer.node_id) != self._expected:
            raise ControlPlaneError(f"the answer is for node {answer.node_id} of {answer.control_plane_id}")
        self._serve(answer.streams)
        self._known = [each.id for each in answer.streams]
