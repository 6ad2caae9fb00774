"""Opens streams into instances: asks the node to connect to this process, and watches that they may go on."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from pydantic import ValidationError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from mooring.control.instances import streams
from mooring.control.instances.streams import Attempt, Requested, StreamOutcome
from mooring.core import ids
from mooring.core.access import RENEWED_S, Access
from mooring.db import failures
from mooring.db.session import Database
from mooring.db.signals import Topic
from mooring.db.types import new_id
from mooring.schemas.agent_streams import AttachRequest, LogsRequest, StreamError, StreamStatus
from mooring.streams.channels import NodeChannel, NodeChannels
from mooring_client.errors import (
    BadSince,
    Conflict,
    DockerUnavailable,
    ExecRejected,
    ExecTimeout,
    InstanceDeleted,
    MooringError,
    NodeFailed,
    NodeTimeout,
    NotRunning,
    NotSupportedByNode,
    PortNotListening,
    ServerEnding,
    Unavailable,
)
from mooring_client.stream_messages import BadMessage, Channel, message, split

# How long a node may take to connect, and how long it may then be silent.
DIAL_IN_S: Final = 10.0
SILENCE_S: Final = 20.0
# A notification reports a change of the instance; reading at times covers a lost one.
_CHECK_EVERY_S: Final = 10.0
_FOREVER_S: Final = 86_400.0
_FAILED: Final = "the server failed; see its log"

_REPORTED: Final = (
    BadSince, DockerUnavailable, ExecRejected, ExecTimeout, InstanceDeleted, NodeTimeout, NotRunning,
    NotSupportedByNode, PortNotListening, ServerEnding,
)  # fmt: skip
# The error for each code that a node reports. "not_found" means the container, not the instance.
ERRORS: Final[Mapping[str, type[MooringError]]] = {
    **{kind.code: kind for kind in _REPORTED},
    "not_found": NotRunning,
    MooringError.code: NodeFailed,
}

_NO_ANSWER: Final = (*failures.DATABASE_ERRORS, Unavailable)  # of the database

OnRequest = Callable[[Session], None]

log = logging.getLogger(__name__)


class RevocableAccess(Protocol):
    """The access of a user, which may be revoked while a stream is open (R29)."""

    @property
    def access(self) -> Access: ...

    async def renewed(self) -> Access:
        """The current access. Raises MooringError: it was revoked."""


Limit = Callable[[str, str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """An attempt of an instance, to which a stream can be opened."""

    instance_id: str
    attempt: int
    node_id: str
    project_id: str


class NodeStream:
    """An open stream. One task may receive while another sends; `close` must be awaited."""

    def __init__(
        self,
        opener: "StreamOpener",
        live: RevocableAccess,
        target: StreamTarget,
        requested: Requested,
        exits: ExitStack,
    ) -> None:
        self.id = new_id(ids.STREAM)
        self._opener, self._live, self.target, self._exits = opener, live, target, exits
        # A log ends with its container, after its last lines.
        self.ends_with_attempt = not isinstance(requested, LogsRequest)
        self._channel: NodeChannel = exits.enter_context(opener.channels.opened(self.id, target.node_id))
        self._opened_at = time.monotonic()
        self._bytes_in = self._bytes_out = 0
        self._first: bytes | None = None
        self._lost: MooringError | None = None
        self._status: StreamStatus | None = None
        self._watching = asyncio.ensure_future(self._watch())

    @property
    def revoked(self) -> asyncio.Event:
        """Set when the stream must end, even if its user reads nothing."""
        return self._channel.revoked

    async def started(self) -> None:
        """Wait until the node has connected, and the log, command or connection is open.

        Raises:
            NodeTimeout: the node did not connect.
            MooringError: the error that the node reports.
        """
        try:
            async with asyncio.timeout(DIAL_IN_S):
                self._first = await self._channel.receive()
        except TimeoutError:
            pass
        if self._first is None:
            raise NodeTimeout("the instance's node did not connect; try again")
        if self._first[:1] == bytes([Channel.STATUS]):
            status = self._status = _status_of(self._first[1:])
            if status.reason is not None:
                raise self.error_of(status.reason)

    def error_of(self, reason: StreamError) -> MooringError:
        """Convert the reason of a status to the error to answer with."""
        return self._lost or ERRORS.get(reason.code, Conflict)(reason.message)

    async def receive(self) -> tuple[Channel, bytes] | StreamStatus:
        """Wait for data from the instance, or the status at the end. Data is empty in a keepalive."""
        if self._status is not None:
            return self._status
        first, self._first = self._first, None
        received = first or await self._next()
        if isinstance(received, StreamStatus):
            return self._ended(received)
        try:
            channel, data = split(received)
        except BadMessage as error:
            return self._ended(StreamStatus.of_error("internal_error", f"the node sent nonsense: {error}"))
        if channel is Channel.STATUS:
            return self._ended(_status_of(data))
        self._bytes_out += len(data)
        return channel, data

    def is_silent(self) -> bool:
        """Whether the stream is open, and nothing was sent by the instance since the last `receive`."""
        if self._first is not None and len(self._first) > 1:
            return False
        return self._status is None and self._channel.is_silent()

    async def _next(self) -> bytes | StreamStatus:
        try:
            async with asyncio.timeout(SILENCE_S):
                received = await self._channel.receive()
        except TimeoutError:
            return StreamStatus.of_error("node_timeout", "the node stopped sending")
        if received is None:
            return StreamStatus.of_error("node_timeout", "the node closed the connection")
        return received

    def _ended(self, status: StreamStatus) -> StreamStatus:
        self._status = status
        return status

    async def send(self, channel: Channel, data: bytes) -> bool:
        """Wait until the node has taken the data. Returns False if its connection is lost."""
        if channel is Channel.STDIN:
            self._bytes_in += len(data)
        return await self._channel.send(message(channel, data))

    async def close(self) -> None:
        """End the stream, and record it in the audit log. Also if the caller is cancelled."""
        await asyncio.shield(self._closed())

    async def _closed(self) -> None:
        self._watching.cancel()
        self._exits.close()
        await self._opener.ended(self.id, self._outcome())

    def _outcome(self) -> StreamOutcome:
        reason: str | None = "client_ended"
        if self._lost is not None:
            reason = self._lost.code
        elif self._status is not None:
            reason = None if self._status.reason is None else self._status.reason.code
        return StreamOutcome(
            duration_s=round(time.monotonic() - self._opened_at, 3),
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            exit_code=None if self._status is None else self._status.exit_code,
            reason=reason,
        )

    def revoke(self, error: MooringError) -> None:
        """End the stream with this reason."""
        self._lost = error
        self._channel.revoke(StreamStatus.of_error(error.code, error.message))

    async def _watch(self) -> None:
        """Check the instance as soon as it changes."""
        signals = self._opener.database.signals
        with signals.subscribed(Topic.instance(self.target.instance_id)) as waiter:
            while not signals.closing:
                if await waiter.wait(_FOREVER_S):
                    await self._opener.check_instances([self])

    async def check_access(self) -> None:
        """Revoke the stream if its user may no longer have it."""
        try:
            access = await self._live.renewed()
            access.require(self.target.project_id, "you may no longer use this instance")
        except MooringError as error:
            self.revoke(error)
        except Exception:
            log.exception("stream %s ends, because its access cannot be checked", self.id)
            self.revoke(MooringError(_FAILED))


class StreamOpener:
    """Opens streams in this process.

    Args:
        url: at which nodes reach this process; None: at that of their other calls.
    """

    def __init__(self, database: Database, url: str | None) -> None:
        self.database, self.url = database, url
        self.channels = NodeChannels()
        self._open: dict[str, NodeStream] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    async def find(self, access: Access, instance_id: str, requested: Requested) -> StreamTarget:
        """Raises NotFound, Forbidden, NotRunning, NodeUnreachable: as `streams.check`."""
        return await run_in_threadpool(self._find, access, instance_id, requested)

    async def open(
        self,
        live: RevocableAccess,
        target: StreamTarget,
        requested: Requested,
        limit: Limit,
        on_request: OnRequest = lambda _session: None,
    ) -> NodeStream:
        """Request a stream, and wait until the node has opened it.

        Args:
            target: from `find`.
            limit: counts the stream for its node and project. Raises TooManyStreamsOnNode.
            on_request: called in the transaction of the request.

        Raises:
            NotFound, Forbidden, NotRunning, NodeUnreachable: as `streams.check`.
            TooManyStreamsOnNode: as `limit`.
            NodeTimeout, MooringError: as `NodeStream.started`.
        """
        with ExitStack() as exits:
            exits.enter_context(limit(target.node_id, target.project_id))
            # The channel must exist before the node can read the request.
            stream = NodeStream(self, live, target, requested, exits.pop_all())
        self._open[stream.id] = stream
        try:
            await run_in_threadpool(self._request, live.access, stream.id, target, requested, on_request)
            self._start_tasks()
            await stream.started()
        except BaseException:
            await stream.close()
            raise
        return stream

    async def check_instances(self, checked: Sequence[NodeStream]) -> None:
        """Revoke those streams whose instance may no longer have them."""
        ending = [each for each in checked if each.ends_with_attempt]
        attempts = {(each.target.instance_id, each.target.attempt) for each in ending}
        if not attempts:
            return
        try:
            errors = await run_in_threadpool(self._ended_attempts, attempts)
        except Exception:
            log.exception("%d streams end, because their instances cannot be checked", len(ending))
            errors = dict.fromkeys(attempts, MooringError(_FAILED))
        for stream in ending:
            error = errors.get((stream.target.instance_id, stream.target.attempt))
            if error is not None:
                stream.revoke(error)

    def _ended_attempts(self, attempts: Collection[Attempt]) -> Mapping[Attempt, MooringError]:
        try:
            with self.database.read() as session:
                return streams.ended_attempts(session, attempts)
        except _NO_ANSWER:
            return {}  # without an answer, nothing is known to have changed

    async def connected(self, stream_id: str) -> None:
        await run_in_threadpool(self._write, lambda session: streams.connected(session, stream_id))

    async def ended(self, stream_id: str, outcome: StreamOutcome) -> None:
        self._open.pop(stream_id, None)
        try:
            await run_in_threadpool(self._write, lambda session: streams.end(session, stream_id, outcome))
        except _NO_ANSWER as error:
            # Its row remains, and is recorded as that of a lost stream (control/retention.py).
            log.warning("cannot record the end of stream %s: %s", stream_id, error)

    def _write(self, write: Callable[[Session], None]) -> None:
        with self.database.write() as session:
            write(session)

    def _find(self, access: Access, instance_id: str, requested: Requested) -> StreamTarget:
        with self.database.read() as session:
            is_running = not isinstance(requested, LogsRequest | AttachRequest)
            row, node_id = streams.check(session, access, instance_id, running=is_running)
            return StreamTarget(row.id, row.attempt, node_id, row.project_id)

    def _request(
        self,
        access: Access,
        stream_id: str,
        target: StreamTarget,
        requested: Requested,
        on_request: OnRequest,
    ) -> None:
        with self.database.write() as session:
            is_running = not isinstance(requested, LogsRequest | AttachRequest)
            row, _node_id = streams.check(session, access, target.instance_id, running=is_running)
            streams.request(session, access, row, stream_id, requested, self.url)
            on_request(session)

    def _start_tasks(self) -> None:
        """Start the tasks that run while streams are open."""
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.ensure_future(self._report_open())
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._check_open())

    async def _check_open(self) -> None:
        """Check at times that the open streams may go on; together, because there may be thousands."""
        checked_at = time.monotonic()
        while self._open:
            await asyncio.sleep(RENEWED_S)
            await asyncio.gather(*(stream.check_access() for stream in list(self._open.values())))
            if time.monotonic() - checked_at > _CHECK_EVERY_S:
                checked_at = time.monotonic()
                await self.check_instances(list(self._open.values()))

    async def _report_open(self) -> None:
        while open_ids := self.channels.ids:
            try:
                await run_in_threadpool(self._write, lambda session: streams.seen(session, open_ids))
            except _NO_ANSWER as error:
                log.warning("cannot report the open streams: %s", error)
            await asyncio.sleep(streams.SEEN_EVERY_S)


def _status_of(data: bytes) -> StreamStatus:
    try:
        return StreamStatus.model_validate_json(data)
    except ValidationError:
        return StreamStatus.of_error(MooringError.code, "the node sent a status that is not valid")
