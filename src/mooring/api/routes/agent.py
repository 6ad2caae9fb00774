"""`/agent/v1`: what nodes call. A node dials out; it needs no open port and sees its own data only (R21)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import CurrentNode, GatedRoute, NodeCaller
from mooring.api.context import Context, Ctx
from mooring.api.http.body import require_json_type
from mooring.api.http.problems import invalid
from mooring.api.openapi.responses import errors
from mooring.api.streaming.channels import Channel
from mooring.control.instances import streams
from mooring.control.nodes import nodes, reports, start_secrets, sync_answers
from mooring.core.errors import (
    Conflict,
    NodeNameMissing,
    NodeNameTaken,
    NotFound,
    StaleSession,
    StreamClosed,
    TooManyHandouts,
)
from mooring.db.signals import AnyTopic, Topic
from mooring.schemas.agent import (
    CredentialAnswer,
    JoinAnswer,
    JoinRequest,
    SessionAnswer,
    StartSecrets,
    StartSecretsRequest,
    SyncAnswer,
    SyncRequest,
)
from mooring.schemas.agent_streams import StreamFrame, StreamRequest, StreamRequests, StreamRequestsQuery

router = APIRouter(prefix="/agent/v1", tags=["agent"], route_class=GatedRoute)

_MAX_FRAME_BYTES = 256 * 1024
_FAREWELL_S = 0.5

Message = TypeVar("Message", bound=BaseModel)
Found = TypeVar("Found")


async def _sync_request(request: Request) -> SyncRequest:
    # Parsed in one pass from the bytes: a report of eight GPUs comes from every node every five seconds.
    require_json_type(request)
    return _parsed(SyncRequest, await request.body())


async def _join_request(request: Request) -> JoinRequest:
    require_json_type(request)
    return _parsed(JoinRequest, await request.body())


async def _start_secrets_request(request: Request) -> StartSecretsRequest:
    require_json_type(request)
    return _parsed(StartSecretsRequest, await request.body())


async def _stream_requests_query(request: Request) -> StreamRequestsQuery:
    require_json_type(request)
    return _parsed(StreamRequestsQuery, await request.body())


def _parsed(kind: type[Message], body: bytes) -> Message:
    """Raises Invalid. What a newer agent adds is ignored."""
    try:
        return kind.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        raise invalid([{**item, "loc": ("body", *item["loc"])} for item in error.errors()]) from None


def _body(kind: type[BaseModel]) -> dict[str, object]:
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


@router.post(
    "/join",
    status_code=201,
    response_model=JoinAnswer,
    responses=errors(Conflict, NodeNameMissing, NodeNameTaken),
    openapi_extra=_body(JoinRequest),
    operation_id="join_node",
)
def join_node(
    body: Annotated[JoinRequest, Depends(_join_request)], request: Request, context: Ctx
) -> JoinAnswer:
    """Redeem a join token for a credential of the node's own. A token works once."""
    address = request.client.host if request.client else None
    with context.credentials.failures.watched(address), context.database.write() as session:
        node, credential = nodes.join(session, body.token, body.node_name, address, request.state.request_id)
    return JoinAnswer(
        node_id=node.id,
        node_name=node.name,
        credential=credential,
        control_plane_id=context.identity.control_plane_id,
    )


@router.post(
    "/session", response_model=SessionAnswer, responses=errors(NotFound), operation_id="open_node_session"
)
def open_session(node: CurrentNode, context: Ctx) -> SessionAnswer:
    """A newly started agent takes over; an older one of the same node hears 409 from now on."""
    with context.database.write() as session:
        number = nodes.open_session(session, node.id, node.credential_hash).session
    return SessionAnswer(session=number, control_plane_id=context.identity.control_plane_id, node_id=node.id)


@router.post(
    "/credential",
    status_code=201,
    response_model=CredentialAnswer,
    responses=errors(Conflict, NotFound),
    operation_id="renew_node_credential",
)
def renew_credential(node: CurrentNode, request: Request, context: Ctx) -> CredentialAnswer:
    """A new credential of the node's own. The first call made with it ends the present one."""
    address = request.client.host if request.client else None
    with context.database.write() as session:
        credential = nodes.renew_credential(
            session, node.id, node.credential_hash, address, request.state.request_id
        )
    return CredentialAnswer(credential=credential)


@router.post(
    "/sync",
    response_model=SyncAnswer,
    responses=errors(Conflict, StaleSession),
    openapi_extra=_body(SyncRequest),
    operation_id="sync_node",
)
async def sync(
    report: Annotated[SyncRequest, Depends(_sync_request)], node: CurrentNode, context: Ctx
) -> Response:
    """Everything the node has, for everything it should have.

    With `wait_s` the answer is held until there is news: a higher generation, or a stream to dial in for if
    the agent is of an earlier release, which does not ask for streams with a call of their own.
    """
    deadline = time.monotonic() + report.wait_s
    topics = [Topic.node(node.id)]
    if not report.facts.asks_for_streams:
        topics.append(Topic.node_streams(node.id))
    left = await run_in_threadpool(_apply, context, node, report)
    while left:
        left = await run_in_threadpool(_apply_rest, context, node, report, left)
    if report.wait_s > 0:
        await _held(context, topics, deadline, partial(_has_news, context, node.id, report), bool)
    # It costs more the more there is on the node, so it is made once, after the wait.
    answer = await run_in_threadpool(_answer, context, node.id, report)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _held(
    context: Context,
    topics: Sequence[AnyTopic],
    deadline: float,
    read: Callable[[], Found],
    is_news: Callable[[Found], bool],
) -> Found:
    """What was read last: news, or what there is at the deadline (monotonic), or when the server ends.

    Args:
        topics: `read` is called again when one of them fires.
    """
    signals = context.database.signals
    with signals.subscribed(*topics) as waiter:
        while True:
            found = await run_in_threadpool(read)
            left = deadline - time.monotonic()
            if is_news(found) or signals.closing or left <= 0:
                return found
            await waiter.wait(left)


def _apply(context: Context, caller: NodeCaller, report: SyncRequest) -> Sequence[str]:
    with context.database.write() as session:
        left = reports.apply(session, caller.id, caller.credential_hash, report)
    context.heard_nodes.add(caller.id)
    return left


def _apply_rest(
    context: Context, caller: NodeCaller, report: SyncRequest, left: Sequence[str]
) -> Sequence[str]:
    with context.database.write() as session:
        return reports.apply_rest(session, caller.id, caller.credential_hash, report, left)


def _has_news(context: Context, node_id: str, report: SyncRequest) -> bool:
    with context.database.read() as session:
        node = nodes.get(session, node_id)
        reports.require_current_session(node, report.session)
        return sync_answers.has_news(session, node, report)


def _answer(context: Context, node_id: str, report: SyncRequest) -> SyncAnswer:
    interval, plane = context.settings.report_interval_s, context.identity.control_plane_id
    with context.database.read() as session:
        node = nodes.get(session, node_id)
        reports.require_current_session(node, report.session)
        return sync_answers.answer(session, node, report, plane, interval)


@router.post(
    "/instances/{instance_id}/start-secrets",
    response_model=StartSecrets,
    responses=errors(Conflict, StaleSession, TooManyHandouts),
    openapi_extra=_body(StartSecretsRequest),
    operation_id="hand_out_start_secrets",
)
def hand_out_start_secrets(
    instance_id: str,
    body: Annotated[StartSecretsRequest, Depends(_start_secrets_request)],
    request: Request,
    node: CurrentNode,
    context: Ctx,
) -> StartSecrets:
    """Secrets and registry credentials of an attempt that this node is about to start, and of no other."""
    address = request.client.host if request.client else None
    with context.database.write() as session:
        return start_secrets.hand_out(
            session,
            context.encryptor,
            node.id,
            node.credential_hash,
            instance_id,
            body,
            (address, request.state.request_id),
        )


@router.post(
    "/stream-requests",
    response_model=StreamRequests,
    responses=errors(Conflict, StaleSession),
    openapi_extra=_body(StreamRequestsQuery),
    operation_id="list_stream_requests",
)
async def list_stream_requests(
    query: Annotated[StreamRequestsQuery, Depends(_stream_requests_query)], node: CurrentNode, context: Ctx
) -> StreamRequests:
    """The streams that the node should dial in for.

    With `wait_s` the answer is held until there is one that is not `known`. Users make nodes send this call,
    which costs the same however much there is on the node; a report costs more with every instance.
    """
    found = await _held(
        context,
        [Topic.node_streams(node.id)],
        time.monotonic() + query.wait_s,
        partial(_waiting_streams, context, node, query.session),
        lambda waiting: bool({each.id for each in waiting} - set(query.known)),
    )
    return StreamRequests(control_plane_id=context.identity.control_plane_id, node_id=node.id, streams=found)


def _waiting_streams(context: Context, caller: NodeCaller, agent_session: int) -> list[StreamRequest]:
    with context.database.read() as session:
        node = nodes.get(session, caller.id)
        nodes.require_current_credential(node, caller.credential_hash)
        reports.require_current_session(node, agent_session)
        return streams.waiting(session, node.id)


@router.post(
    "/streams/{stream_id}", status_code=204, responses=errors(StreamClosed), operation_id="bring_stream"
)
async def bring_stream(stream_id: str, request: Request, node: CurrentNode, context: Ctx) -> Response:
    """Frames of logs or of an exec, one JSON object a line, for as long as somebody reads them."""
    channel = context.channels.find(stream_id)
    if channel is None or channel.node_id != node.id:
        raise NotFound(f"nobody waits for stream {stream_id} here")
    await run_in_threadpool(_picked_up, context, stream_id)
    bringing, closed = (
        asyncio.ensure_future(_bring(request, channel)),
        asyncio.ensure_future(channel.closed()),
    )
    try:
        await asyncio.wait({bringing, closed}, return_when=asyncio.FIRST_COMPLETED)
        # A reader goes as soon as it has the last frame, which the node may be about to follow with its end.
        await asyncio.wait({bringing}, timeout=_FAREWELL_S)
        if bringing.done():
            bringing.result()
    finally:
        bringing.cancel()
        closed.cancel()
    if not bringing.done():
        raise StreamClosed("nobody reads this stream any more")
    return Response(status_code=204)


async def _bring(request: Request, channel: Channel) -> None:
    async for frame in _frames(request):
        if not await channel.put(frame) and not frame.is_last:
            raise StreamClosed("nobody reads this stream any more")
    await channel.put(None)


def _picked_up(context: Context, stream_id: str) -> None:
    with context.database.write() as session:
        streams.forget(session, stream_id)


async def _frames(request: Request) -> AsyncIterator[StreamFrame]:
    left = b""
    async for chunk in request.stream():
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            if line:
                yield _parsed(StreamFrame, line)
        if len(left) > _MAX_FRAME_BYTES:
            raise invalid([{"loc": ("body",), "type": "frame_too_long", "msg": "a frame is too long"}])
