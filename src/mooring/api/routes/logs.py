"""Logs of instances: the node connects to this replica, which converts its lines to text or events."""

from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from sqlalchemy.orm import Session
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mooring.api.auth import audited_reads
from mooring.api.auth.authorization import CurrentLiveAccess
from mooring.api.context import Context, Ctx
from mooring.api.http.body import StrictRoute
from mooring.api.openapi.responses import errors
from mooring.api.streaming import sse
from mooring.control.instances import instances
from mooring.core.access import Access
from mooring.schemas.agent_streams import LogsRequest, StreamStatus
from mooring.streams.node_streams import ERRORS, NodeStream
from mooring_client.errors import BadEventId, Conflict, NodeUnreachable, TooManyStreamsOnNode
from mooring_client.schemas.base import RequestTime
from mooring_client.schemas.text import MAX_LINE_BYTES
from mooring_client.stream_messages import Channel
from mooring_client.terminal_text import clean_line

router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=StrictRoute)

_NAMES = {Channel.STDOUT: "stdout", Channel.STDERR: "stderr"}


@router.get(
    "/{instance_id}/logs",
    response_class=PlainTextResponse,
    responses={
        200: {"content": {sse.MEDIA_TYPE: {"schema": {"type": "string"}}}},
        **errors(NodeUnreachable, TooManyStreamsOnNode, Conflict, *ERRORS.values()),
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
    audit = partial(_audit, context, live.access, instance_id)
    target = await context.streams.find(live.access, instance_id, request)
    stream = await context.streams.open(live, target, request, context.limit_of(live.access), audit)
    if sse.wanted(accept):
        body = _as_events(stream, resumed)
        return _StreamAnswer(stream, body, media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)
    return _StreamAnswer(stream, _as_text(stream), media_type="text/plain; charset=utf-8")


def _audit(context: Context, access: Access, instance_id: str, session: Session) -> None:
    row = instances.get(session, access, instance_id)
    if audited_reads.is_outside_admin(access, row.project_id):
        context.audited_reads.record(session, access, audited_reads.READ_LOGS, row.id, row.project_id)


class _StreamAnswer(StreamingResponse):
    """Always closes its stream, even if the client disconnects before the body's generator starts."""

    def __init__(self, stream: NodeStream, body: AsyncIterator[bytes], **more: Any) -> None:
        super().__init__(body, **more)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()


def _line_time(last_event_id: str | None) -> str | None:
    if last_event_id is None:
        return None
    try:
        datetime.fromisoformat(last_event_id)
    except ValueError:
        raise BadEventId("Last-Event-ID must be the id of a log line, which is its time") from None
    return last_event_id


def _text(data: bytes) -> str:
    """Clean and cut text here too: a stolen node credential can send anything (R18)."""
    return clean_line(data[:MAX_LINE_BYTES].decode(errors="replace"))


async def _as_text(stream: NodeStream) -> AsyncIterator[bytes]:
    while not isinstance(found := await stream.receive(), StreamStatus):
        _channel, data = found
        if data:
            yield f"{_text(data.partition(b' ')[2])}\n".encode()
    if found.reason is not None:
        yield f"[mooring: the stream was interrupted: {found.reason.message}]\n".encode()


async def _as_events(stream: NodeStream, resumed: str | None) -> AsyncIterator[bytes]:
    while not isinstance(found := await stream.receive(), StreamStatus):
        channel, data = found
        at, _, line = data.partition(b" ")
        if not data:
            yield sse.KEEPALIVE
        elif channel in _NAMES and (time := _text(at)) != resumed:
            yield sse.frame({"stream": _NAMES[channel], "line": _text(line), "at": time}, time)
    if found.reason is not None:
        yield sse.error(found.reason.code, found.reason.message)
