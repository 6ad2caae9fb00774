"""`/agent/v1`, called by node agents. A node needs no open port and sees only its own data (R21)."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mooring.api.auth.authorization import (
    DOCUMENTED_NODE,
    AuthorizedRoute,
    CurrentNode,
    FrequentRoute,
)
from mooring.api.context import Context, Ctx
from mooring.api.http.body import require_json_type
from mooring.api.http.problems import invalid
from mooring.api.openapi.responses import errors
from mooring.auth.credentials import NodeCaller
from mooring.control.instances import streams
from mooring.control.nodes import heartbeats, joins, nodes, reports, start_secrets, sync_answers
from mooring.control.nodes.heartbeats import HeartbeatOutcome, NodeHeartbeat
from mooring.control.nodes.reports import Applied
from mooring.core.node_loss import self_fence_s
from mooring.db.signals import AnyTopic, Topic
from mooring.db.tables import Node
from mooring.schemas.agent import (
    CredentialAnswer,
    Heartbeat,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    SessionAnswer,
    StartSecrets,
    StartSecretsRequest,
    SyncAnswer,
    SyncRequest,
)
from mooring.schemas.agent_streams import StreamRequest, StreamRequests, StreamRequestsQuery
from mooring.streams import handshakes
from mooring.streams.handshakes import StreamAnswer
from mooring_client.errors import (
    Conflict,
    NodeNameMissing,
    NodeNameTaken,
    NotFound,
    StaleSession,
    TooManyHandouts,
    UpgradeRequired,
)
from mooring_client.stream_messages import SUBPROTOCOL

router = APIRouter(prefix="/agent/v1", tags=["agent"], route_class=AuthorizedRoute)
frequent = APIRouter(
    prefix="/agent/v1", tags=["agent"], route_class=FrequentRoute, dependencies=[DOCUMENTED_NODE]
)

Message = TypeVar("Message", bound=BaseModel)
Found = TypeVar("Found")


def _parser_of(kind: type[Message]) -> Callable[[Request], Awaitable[Message]]:
    async def parse(request: Request) -> Message:
        return await _body_of(request, kind)

    return parse


async def _body_of(request: Request, kind: type[Message]) -> Message:
    """Parse the body, from bytes in one pass: every node sends a report every five seconds."""
    require_json_type(request)
    return _parsed(kind, await request.body())


def _parsed(kind: type[Message], body: bytes) -> Message:
    """Parse a body and ignore unknown fields, which a newer agent may send. Raises Invalid."""
    try:
        return kind.model_validate_json(body, extra="ignore", strict=True)
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
    body: Annotated[JoinRequest, Depends(_parser_of(JoinRequest))], request: Request, context: Ctx
) -> JoinAnswer:
    """Join a node with a join token, which works once. From then on the node has a credential of its own."""
    address = request.client.host if request.client else None
    with context.credentials.failures.watched(address), context.database.write() as session:
        node, credential = joins.join(
            session, body.token, body.node_name, body.credential_hash, address, request.state.request_id
        )
    return JoinAnswer(
        node_id=node.id,
        node_name=node.name,
        credential=credential or "",
        control_plane_id=context.identity.control_plane_id,
    )


@router.post(
    "/session", response_model=SessionAnswer, responses=errors(NotFound), operation_id="open_node_session"
)
def open_session(node: CurrentNode, context: Ctx) -> SessionAnswer:
    """Open an agent session. Requests of older sessions of the node are answered 409 from now on."""
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
    """Renew the node credential. The old one stays valid until the new one is first used."""
    address = request.client.host if request.client else None
    with context.database.write() as session:
        credential = nodes.renew_credential(
            session, node.id, node.credential_hash, address, request.state.request_id
        )
    return CredentialAnswer(credential=credential, node_id=node.id)


@router.post(
    "/sync",
    response_model=SyncAnswer,
    responses=errors(Conflict, StaleSession),
    openapi_extra=_body(SyncRequest),
    operation_id="sync_node",
)
async def sync(
    report: Annotated[SyncRequest, Depends(_parser_of(SyncRequest))], node: CurrentNode, context: Ctx
) -> Response:
    """Sync a node. Stores the node's report and answers with the node's desired state.

    With `wait_s`, the answer waits for a higher generation. For agents of earlier releases, which do not
    call `stream-requests`, it also waits for a stream request.
    """
    deadline = time.monotonic() + report.wait_s
    topics = [Topic.node(node.id)]
    if not report.facts.asks_for_streams:
        topics.append(Topic.node_streams(node.id))
    applied = await run_in_threadpool(_apply, context, node, report)
    while applied.left:
        applied = await run_in_threadpool(_apply_rest, context, node, report, applied.left)
    answer: SyncAnswer | None = None
    if report.wait_s > 0:
        news = partial(_news, context, node.id, report, applied.revision)
        answer = await _poll(context, topics, deadline, news, lambda found: found is not None)
    if answer is None:
        answer = await run_in_threadpool(_answer, context, node.id, report, applied.revision)
    return Response(answer.model_dump_json(), media_type="application/json")


@frequent.post(
    "/heartbeat",
    response_model=HeartbeatAnswer,
    responses=errors(),
    openapi_extra=_body(Heartbeat),
    operation_id="heartbeat",
)
async def heartbeat(request: Request) -> Response:
    """Send a heartbeat. Confirms that the node's last report is still true, and stores new samples.

    With `wait_s`, the answer waits for a change of the desired state. It comes once the heartbeat is stored,
    so a node whose heartbeats are answered does not become `unreachable`.
    """
    node, context = _caller_of(request)
    signals = context.database.signals
    with signals.subscribed(Topic.node(node.id)) as waiter:
        stored, deadline = await _store_in_batch(request, node, context)
        wanted = not stored
        if stored and not signals.closing and (left := deadline - time.monotonic()) > 0:
            wanted = await waiter.wait(left)
    answer = HeartbeatAnswer(
        control_plane_id=context.identity.control_plane_id,
        node_id=node.id,
        report_interval_s=context.settings.report_interval_s,
        self_fence_s=self_fence_s(context.settings.lost_after_s),
        report_wanted=wanted,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def _caller_of(request: Request) -> tuple[NodeCaller, Context]:
    """The node and the context of a call of a FrequentRoute."""
    return request.state.node, request.app.state.context


async def _store_in_batch(request: Request, node: NodeCaller, context: Context) -> tuple[bool, float]:
    """Store the heartbeat of this request. Returns whether it was stored, and when to answer at the latest.

    A function of its own, so that the samples are no longer in memory while the answer waits.
    """
    body = await _body_of(request, Heartbeat)
    deadline = time.monotonic() + body.wait_s
    sent = NodeHeartbeat(node.credential_hash, body)
    return await context.heartbeats.stored(node.id, sent, partial(_store_batch, context)), deadline


def _store_batch(context: Context, sent: Mapping[str, NodeHeartbeat]) -> dict[str, HeartbeatOutcome]:
    with context.database.write() as session:
        return heartbeats.store(session, sent)


async def _poll(
    context: Context,
    topics: Sequence[AnyTopic],
    deadline: float,
    read: Callable[[], Found],
    is_new: Callable[[Found], bool],
) -> Found:
    """Call `read` until `is_new` accepts its result, the deadline passes or the server shuts down.

    Args:
        topics: `read` is called again after a notification on one of them, and only then.
        deadline: on the monotonic clock.
    """
    signals = context.database.signals
    with signals.subscribed(*topics) as waiter:
        while True:
            found = await run_in_threadpool(read)
            left = deadline - time.monotonic()
            if is_new(found) or signals.closing or left <= 0 or not await waiter.wait(left):
                return found


def _apply(context: Context, caller: NodeCaller, report: SyncRequest) -> Applied:
    with context.database.write() as session:
        applied = reports.apply(session, caller.id, caller.credential_hash, report)
    context.reporting_nodes.add(caller.id)
    return applied


def _apply_rest(context: Context, caller: NodeCaller, report: SyncRequest, left: Sequence[str]) -> Applied:
    with context.database.write() as session:
        return reports.apply_rest(session, caller.id, caller.credential_hash, report, left)


def _news(context: Context, node_id: str, report: SyncRequest, revision: int | None) -> SyncAnswer | None:
    """The answer, if the node should have it at once. Its cost grows with the node's number of instances."""
    with context.database.read() as session:
        node = _reporting_node(session, node_id, report)
        if not sync_answers.has_news(session, node, report):
            return None
        return _answer_of(context, session, node, report, revision)


def _answer(context: Context, node_id: str, report: SyncRequest, revision: int | None) -> SyncAnswer:
    with context.database.read() as session:
        node = _reporting_node(session, node_id, report)
        return _answer_of(context, session, node, report, revision)


def _reporting_node(session: Session, node_id: str, report: SyncRequest) -> Node:
    node = nodes.get(session, node_id)
    nodes.require_current_session(node, report.session)
    return node


def _answer_of(
    context: Context, session: Session, node: Node, report: SyncRequest, revision: int | None
) -> SyncAnswer:
    interval, control_plane_id = context.settings.report_interval_s, context.identity.control_plane_id
    fence_s = self_fence_s(context.settings.lost_after_s)
    return sync_answers.answer(session, node, report, control_plane_id, interval, fence_s, revision)


@router.post(
    "/instances/{instance_id}/start-secrets",
    response_model=StartSecrets,
    responses=errors(Conflict, StaleSession, TooManyHandouts),
    openapi_extra=_body(StartSecretsRequest),
    operation_id="hand_out_start_secrets",
)
def hand_out_start_secrets(
    instance_id: str,
    body: Annotated[StartSecretsRequest, Depends(_parser_of(StartSecretsRequest))],
    request: Request,
    node: CurrentNode,
    context: Ctx,
) -> StartSecrets:
    """Get start secrets. Returns secrets and registry credentials of an attempt that this node starts."""
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


@frequent.post(
    "/stream-requests",
    response_model=StreamRequests,
    responses=errors(Conflict, StaleSession),
    openapi_extra=_body(StreamRequestsQuery),
    operation_id="list_stream_requests",
)
async def list_stream_requests(request: Request) -> Response:
    """List stream requests. Returns the streams that the node should connect for.

    With `wait_s`, the answer waits for a stream that is not in `known`. Its cost does not depend on the
    number of instances on the node, unlike that of a report.
    """
    node, context = _caller_of(request)
    query = await _body_of(request, StreamRequestsQuery)
    found = await _poll(
        context,
        [Topic.node_streams(node.id)],
        time.monotonic() + query.wait_s,
        partial(_waiting_streams, context, node, query.session),
        lambda found: bool({each.id for each in found} - set(query.known)),
    )
    answer = StreamRequests(
        control_plane_id=context.identity.control_plane_id, node_id=node.id, streams=found
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def _waiting_streams(context: Context, caller: NodeCaller, agent_session: int) -> list[StreamRequest]:
    with context.database.read() as session:
        return streams.waiting_for_agent(session, caller.id, caller.credential_hash, agent_session)


@router.get(
    "/streams/{stream_id}", status_code=101, responses=errors(UpgradeRequired), operation_id="bring_stream"
)
async def bring_stream(stream_id: str, request: Request, node: CurrentNode, context: Ctx) -> Response:
    """Connect for a stream. The WebSocket has the channels of `v5.channel.k8s.io`."""
    channel = context.streams.channels.find(stream_id, node.id)
    if channel is None or channel.is_connected:
        raise NotFound(f"no client waits for stream {stream_id} on this replica")
    handshakes.require(request, SUBPROTOCOL)
    await context.streams.connected(stream_id)
    return StreamAnswer(channel.serve)
