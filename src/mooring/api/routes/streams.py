"""Logs and exec: the instance's node connects to this replica, which relays the stream to the user."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mooring.api.auth import audited_reads
from mooring.api.auth.authorization import CurrentLiveAccess
from mooring.api.auth.credentials import RENEWED_S, LiveAccess
from mooring.api.context import Context, Ctx
from mooring.api.http import responses, transactions
from mooring.api.http.body import StrictRoute
from mooring.api.http.transactions import CurrentCall
from mooring.api.openapi.responses import errors
from mooring.api.streaming import sse
from mooring.api.streaming.channels import Channel
from mooring.control import idempotency
from mooring.control.instances import streams
from mooring.core import ids
from mooring.core.access import Access
from mooring.core.errors import (
    BadEventId,
    BadSince,
    Conflict,
    DockerUnavailable,
    ExecTimeout,
    MooringError,
    NodeFailed,
    NodeTimeout,
    NodeUnreachable,
    NotFound,
    NotRunning,
    NotSupportedByNode,
    ServerEnding,
    TooManyStreamsOnNode,
)
from mooring.core.text import MAX_LINE_BYTES, clean_line
from mooring.db.types import new_id
from mooring.schemas.agent_streams import ExecRequest, LogsRequest, StreamError, StreamFrame
from mooring.schemas.base import Json, RequestTime
from mooring.schemas.instances import MAX_OUTPUT_BYTES, ExecBody, ExecResult

router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=StrictRoute)

# How long a node may take to connect, and how long it may then be silent.
DIAL_IN_S = 10.0
SILENCE_S = 20.0
# Errors after which the command of an exec cannot have run.
_NOTHING_RAN = (NotFound, NotRunning, NodeUnreachable, TooManyStreamsOnNode)
_IN_FRAMES = (
    BadSince, DockerUnavailable, ExecTimeout, NodeTimeout, NotRunning, NotSupportedByNode, ServerEnding
)  # fmt: skip
# The error to answer for each code of a frame. "not_found" means the container, not the instance.
_ERRORS: Mapping[str, type[MooringError]] = {
    **{kind.code: kind for kind in _IN_FRAMES},
    "not_found": NotRunning,
    MooringError.code: NodeFailed,
}


class StreamRelay:
    """Relays one stream. `close` makes the node stop; the stream also ends when its caller loses access."""

    def __init__(
        self, context: Context, live: LiveAccess, node_id: str, project_id: str, stream_id: str
    ) -> None:
        self._context = context
        self.id = stream_id
        self._exits = ExitStack()
        is_admin = live.access.caller.is_admin
        self._exits.enter_context(context.node_streams.opened(node_id, project_id, is_admin=is_admin))
        self.channel: Channel = self._exits.enter_context(context.channels.opened(stream_id, node_id))
        self._lost: MooringError | None = None
        self._watching = asyncio.ensure_future(self._watch(live, project_id))

    async def _watch(self, live: LiveAccess, project_id: str) -> None:
        try:
            while True:
                await asyncio.sleep(RENEWED_S)
                (await live.renewed()).require(project_id, "you may no longer read this instance")
        except MooringError as error:
            self._lost = error
            self.channel.revoke(StreamError(code=error.code, message=error.message))

    async def first(self) -> StreamFrame:
        """Return the first frame, which proves that the node is connected.

        Raises:
            NodeTimeout: the node did not connect.
            MooringError: the error that the node reports.
        """
        try:
            frame = await anext(self.channel.frames(DIAL_IN_S))
        except (TimeoutError, StopAsyncIteration):
            raise NodeTimeout("the instance's node did not connect; try again") from None
        if frame.error is not None:
            raise self.error_of(frame.error)
        return frame

    def error_of(self, error: StreamError) -> MooringError:
        """Convert the error of a frame to the error to answer with."""
        return self._lost or _ERRORS.get(error.code, Conflict)(error.message)

    async def frames(self, first: StreamFrame) -> AsyncIterator[StreamFrame]:
        """Yield all frames, beginning with `first`. The last one is an error if the node stops sending."""
        yield first
        if first.is_last:
            return
        try:
            async with aclosing(self.channel.frames(SILENCE_S)) as frames:
                async for frame in frames:
                    yield frame
                    if frame.is_last:
                        return
        except TimeoutError:
            yield StreamFrame.of_error("node_timeout", "the node stopped sending")

    async def close(self) -> None:
        self._watching.cancel()
        self._exits.close()
        await run_in_threadpool(_remove_request, self._context, self.id)


async def _open(
    context: Context, live: LiveAccess, instance_id: str, request: LogsRequest | ExecRequest
) -> StreamRelay:
    node_id, project_id = await run_in_threadpool(_find, context, live.access, instance_id, request)
    # The channel must exist before the node can read the stream request.
    stream = StreamRelay(context, live, node_id, project_id, new_id(ids.STREAM))
    try:
        await run_in_threadpool(_request, context, live.access, instance_id, stream.id, request)
    except BaseException:
        await asyncio.shield(stream.close())
        raise
    return stream


def _find(
    context: Context, access: Access, instance_id: str, request: LogsRequest | ExecRequest
) -> tuple[str, str]:
    """Return the ids of the instance's node and project."""
    with context.database.read() as session:
        row, node_id = streams.check(session, access, instance_id, running=isinstance(request, ExecRequest))
        return node_id, row.project_id


def _request(
    context: Context, access: Access, instance_id: str, stream_id: str, request: LogsRequest | ExecRequest
) -> None:
    with context.database.write() as session:
        row, _node_id = streams.check(session, access, instance_id, running=isinstance(request, ExecRequest))
        streams.request(session, access, row, stream_id, request, context.settings.advertise_url)
        if isinstance(request, LogsRequest) and audited_reads.is_outside_admin(access, row.project_id):
            reads = context.audited_reads
            reads.record(session, access, audited_reads.READ_LOGS, row.id, row.project_id)


def _remove_request(context: Context, stream_id: str) -> None:
    with context.database.write() as session:
        streams.forget(session, stream_id)


@router.get(
    "/{instance_id}/logs",
    response_class=PlainTextResponse,
    responses={
        200: {"content": {sse.MEDIA_TYPE: {"schema": {"type": "string"}}}},
        **errors(NodeUnreachable, TooManyStreamsOnNode, Conflict, *_ERRORS.values()),
    },
    operation_id="get_instance_logs",
)
async def get_instance_logs(
    instance_id: str,
    context: Ctx,
    live: CurrentLiveAccess,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="number of last lines")] = 100,
    since: Annotated[RequestTime | None, Query(description="only lines from this time on")] = None,
    follow: Annotated[bool, Query(description="follow until the container ends")] = False,
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
    last_event_id: Annotated[
        str | None,
        Header(
            max_length=64,
            description="the `id:` of the last line that you have, which is its time",
            json_schema_extra={"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"},
        ),
    ] = None,
) -> Response:
    """Get instance logs. They stay available until the instance is deleted or started again."""
    resumed = _line_time(last_event_id)
    request = LogsRequest(
        tail=None if resumed else tail, since=resumed or (since.isoformat() if since else None), follow=follow
    )
    stream = await _open(context, live, instance_id, request)
    try:
        first = await stream.first()
    except BaseException:
        await stream.close()
        raise
    if sse.wanted(accept):
        body = _as_events(stream, first, resumed)
        return _StreamAnswer(stream, body, media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)
    return _StreamAnswer(stream, _as_text(stream, first), media_type="text/plain; charset=utf-8")


class _StreamAnswer(StreamingResponse):
    """Always closes its stream, even if the client disconnects before the body's generator starts."""

    def __init__(self, stream: StreamRelay, body: AsyncIterator[bytes], **more: Any) -> None:
        super().__init__(body, **more)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._stream.close())


def _line_time(last_event_id: str | None) -> str | None:
    if last_event_id is None:
        return None
    try:
        datetime.fromisoformat(last_event_id)
    except ValueError:
        raise BadEventId("Last-Event-ID must be the id of a log line, which is its time") from None
    return last_event_id


def _line(text: str) -> str:
    """Clean and cut a line here too: a stolen node credential can send anything (R18)."""
    return clean_line(text[:MAX_LINE_BYTES])


async def _as_text(stream: StreamRelay, first: StreamFrame) -> AsyncIterator[bytes]:
    async for frame in stream.frames(first):
        if frame.text is not None:
            yield f"{_line(frame.text)}\n".encode()
        elif frame.error is not None:
            yield f"[mooring: the stream was interrupted: {frame.error.message}]\n".encode()


async def _as_events(stream: StreamRelay, first: StreamFrame, resumed: str | None) -> AsyncIterator[bytes]:
    async for frame in stream.frames(first):
        if frame.text is not None and frame.at != resumed:
            at = None if frame.at is None else _line(frame.at)
            yield sse.frame({"stream": frame.stream, "line": _line(frame.text), "at": at}, at)
        elif frame.error is not None:
            yield sse.error(frame.error.code, frame.error.message)
        elif frame.text is None:
            yield sse.KEEPALIVE


@router.post(
    "/{instance_id}/exec",
    response_model=ExecResult,
    responses=errors(NodeUnreachable, TooManyStreamsOnNode, *_ERRORS.values()),
    operation_id="exec_in_instance",
)
async def exec_in_instance(
    instance_id: str, body: ExecBody, context: Ctx, call: CurrentCall, live: CurrentLiveAccess
) -> Response:
    """Run a command in an instance. Waits for its end and returns at most 1 MiB of its output."""
    key = call.idempotency_key
    if key is not None:
        # A command runs outside any transaction: the key is claimed before it, the answer stored after it.
        stored = await run_in_threadpool(_claim, context, call)
        if stored is not None:
            return responses.respond(stored, replayed=True)
    try:
        # The output may contain secrets, so it is stored encrypted.
        answer = responses.json_answer(await _exec(context, live, instance_id, body), encrypted=True)
    except MooringError as error:
        # The key is free again only if the command cannot have run.
        if key is not None and isinstance(error, _NOTHING_RAN):
            await asyncio.shield(run_in_threadpool(_abandon, context, call.access.caller.id, key))
        raise
    if key is not None:
        await run_in_threadpool(_store, context, call, answer)
    return responses.respond(answer)


def _claim(context: Context, call: transactions.Call) -> idempotency.StoredAnswer | None:
    with context.database.write() as session:
        return transactions.claim(context, session, call)


def _store(context: Context, call: transactions.Call, answer: idempotency.StoredAnswer) -> None:
    with context.database.write() as session:
        transactions.store(context, session, call, answer)


def _abandon(context: Context, caller: str, key: str) -> None:
    with context.database.write() as session:
        idempotency.abandon(session, caller, key)


async def _exec(context: Context, live: LiveAccess, instance_id: str, body: ExecBody) -> Json:
    request = ExecRequest(command=body.command, timeout_s=body.timeout_s, max_output_bytes=MAX_OUTPUT_BYTES)
    stream = await _open(context, live, instance_id, request)
    try:
        return await _collected(stream, await stream.first())
    finally:
        await asyncio.shield(stream.close())


async def _collected(stream: StreamRelay, first: StreamFrame) -> Json:
    printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
    truncated = False
    async for frame in stream.frames(first):
        if frame.error is not None:
            raise stream.error_of(frame.error)
        truncated = truncated or frame.truncated
        if frame.stream is not None and frame.text is not None:
            printed[frame.stream].append(frame.text)
        if frame.exit_code is not None:
            output = {name: "".join(parts) for name, parts in printed.items()}
            return {"exit_code": frame.exit_code, **output, "truncated": truncated}
    raise NodeTimeout("the node ended the stream without an exit code; the command may have run")
