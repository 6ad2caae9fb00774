"""Streams in both directions over a WebSocket: commands with an input, and connections to ports."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from mooring.api.auth.authorization import CurrentLiveAccess
from mooring.api.context import Ctx
from mooring.api.http.body import StrictRoute
from mooring.api.openapi.responses import errors
from mooring.schemas.agent_streams import MAX_WINDOW, AttachRequest, DialRequest, ExecRequest, WindowSize
from mooring.streams import handshakes
from mooring.streams.handshakes import StreamAnswer
from mooring.streams.node_streams import ERRORS, NodeStream
from mooring.streams.relay import ChannelRelay, Relay, TcpRelay, relay
from mooring_client.errors import (
    BadRequest,
    NodeUnreachable,
    TooManyStreamsOnNode,
    UpgradeRequired,
)
from mooring_client.schemas.spec import WorkingDir
from mooring_client.schemas.text import EnvEntry, LongText, Text
from mooring_client.stream_messages import SUBPROTOCOL, TCP_SUBPROTOCOL

router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=StrictRoute)

_ERRORS = errors(UpgradeRequired, BadRequest, NodeUnreachable, TooManyStreamsOnNode, *ERRORS.values())
_Size = Annotated[int, Query(ge=1, le=MAX_WINDOW, description="of the terminal, in characters")]


@router.get(
    "/{instance_id}/exec/stream", status_code=101, responses=_ERRORS, operation_id="stream_exec_in_instance"
)
async def stream_exec_in_instance(
    instance_id: str,
    request: Request,
    context: Ctx,
    live: CurrentLiveAccess,
    command: Annotated[
        list[LongText], Query(min_length=1, max_length=128, description="the program and its arguments")
    ],
    tty: Annotated[bool, Query(description="run it in a terminal; all output is then on channel 1")] = False,
    stdin: Annotated[bool, Query(description="open the command's input")] = False,
    user: Annotated[Text | None, Query(max_length=128, description="name or uid, and `:group`")] = None,
    working_dir: Annotated[WorkingDir | None, Query(description="default: that of the image")] = None,
    env: Annotated[list[EnvEntry], Query(max_length=128, description="`NAME=value`")] = [],  # noqa: B006
    width: _Size = 80,
    height: _Size = 24,
) -> Response:
    """Run a command over a WebSocket, with input, a terminal and signals.

    Subprotocol `v5.channel.k8s.io`: messages are binary, and the first byte is the channel. 0: input, 1:
    output, 2: error output, 3: the status `{"exit_code", "reason"}` as the last message, 4: resize
    `{"Width", "Height"}`, 5: signal `{"Signal": "INT"}`, 255: close the channel in the next byte. When the
    connection ends, the command is killed.
    """
    requested = ExecRequest(
        command=command,
        tty=tty,
        stdin=stdin,
        user=user,
        working_dir=working_dir,
        env=dict(each.split("=", 1) for each in env),
        window=WindowSize(width=width, height=height) if tty else None,
    )
    target = await context.streams.find(live.access, instance_id, requested)
    handshakes.require(request, SUBPROTOCOL)
    stream = await context.streams.open(live, target, requested, context.limit_of(live.access))
    return StreamAnswer(partial(_relay, stream, ChannelRelay(SUBPROTOCOL, stdin=stdin)))


@router.get(
    "/{instance_id}/attach/stream",
    status_code=101,
    responses=_ERRORS,
    operation_id="stream_attach_to_instance",
)
async def stream_attach_to_instance(
    instance_id: str,
    request: Request,
    context: Ctx,
    live: CurrentLiveAccess,
    stdin: Annotated[bool, Query(description="send input; the spec needs `stdin`")] = False,
    width: _Size = 80,
    height: _Size = 24,
) -> Response:
    """Attach to the main process over a WebSocket. It runs on when the connection ends.

    Messages are those of `exec/stream`. Output begins with the connection. After a start with `attach`, `tty`
    or `stdin` in the spec, the first client within 30 s gets all of it, even if the process has ended.
    """
    requested = AttachRequest(stdin=stdin, window=WindowSize(width=width, height=height))
    target = await context.streams.find(live.access, instance_id, requested)
    handshakes.require(request, SUBPROTOCOL)
    stream = await context.streams.open(live, target, requested, context.limit_of(live.access))
    return StreamAnswer(partial(_relay, stream, ChannelRelay(SUBPROTOCOL, stdin=stdin)))


@router.get(
    "/{instance_id}/ports/{port}/stream",
    status_code=101,
    responses=_ERRORS,
    operation_id="stream_instance_port",
)
async def stream_instance_port(
    instance_id: str,
    port: Annotated[int, Path(ge=1, le=65_535)],
    request: Request,
    context: Ctx,
    live: CurrentLiveAccess,
) -> Response:
    """Connect to a TCP port in an instance over a WebSocket, also to one that listens on 127.0.0.1 only.

    Subprotocol `tcp`: messages are binary data, and an empty message closes the direction of its sender.
    """
    requested = DialRequest(port=port)
    target = await context.streams.find(live.access, instance_id, requested)
    handshakes.require(request, TCP_SUBPROTOCOL)
    stream = await context.streams.open(live, target, requested, context.limit_of(live.access))
    return StreamAnswer(partial(_relay, stream, TcpRelay(TCP_SUBPROTOCOL)))


async def _relay(stream: NodeStream, kind: Relay, websocket: WebSocket) -> None:
    try:
        await relay(websocket, stream, kind)
    finally:
        await stream.close()
