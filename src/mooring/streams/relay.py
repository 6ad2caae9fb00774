"""Copies a stream between an instance and the WebSocket of a user."""

import asyncio
from typing import Any, Final, Protocol

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from mooring.schemas.agent_streams import Signal, StreamStatus, WindowSize
from mooring.streams.node_streams import NodeStream
from mooring.streams.tasks import cancelled
from mooring.streams.websockets import connection_of
from mooring_client.stream_messages import (
    STDIN_CLOSED,
    STDOUT_CLOSED,
    BadMessage,
    Channel,
    message,
    split,
)

# How long a user who reads slowly may take to read the status.
STATUS_WITHIN_S: Final = 2.0
_NORMAL: Final = 1000
# Close codes of WebSockets (RFC 6455, section 7.4.1), by the reason's code.
_CLOSE_CODES: Final = {"server_ending": 1001, "bad_message": 1003, "unauthorized": 1008, "forbidden": 1008}
_INTERNAL_ERROR: Final = 1011
_MAX_REASON_BYTES: Final = 120  # of a close frame

Input = tuple[Channel, bytes]


class Relay(Protocol):
    """One subprotocol: how messages of a user become data for the instance, and the reverse."""

    subprotocol: str

    def input_of(self, received: bytes) -> Input | None:
        """Raises BadMessage: the message does not follow the subprotocol."""

    def output_of(self, channel: Channel, data: bytes) -> bytes | None:
        """The message for the user; None: the data is not for users."""

    def status_of(self, status: StreamStatus) -> bytes | None:
        """The last message; None: the subprotocol has none."""


class ChannelRelay:
    """The channels of `v5.channel.k8s.io`.

    Args:
        stdin: whether the command has an input.
    """

    def __init__(self, subprotocol: str, *, stdin: bool) -> None:
        self.subprotocol, self._stdin = subprotocol, stdin

    def input_of(self, received: bytes) -> Input | None:
        channel, data = split(received)
        match channel:
            case Channel.STDIN if data and not self._stdin:
                raise BadMessage("the command has no input: connect with stdin=true")
            case Channel.STDIN:
                return (channel, data) if data else None
            case Channel.RESIZE:
                return channel, _valid(WindowSize, data)
            case Channel.SIGNAL:
                return channel, _valid(Signal, data)
            case Channel.CLOSE if data == STDIN_CLOSED[1:]:
                return channel, data
            case _:
                raise BadMessage(f"a client may not send on channel {int(channel)}")

    def output_of(self, channel: Channel, data: bytes) -> bytes | None:
        return message(channel, data) if data and channel in {Channel.STDOUT, Channel.STDERR} else None

    def status_of(self, status: StreamStatus) -> bytes | None:
        return message(Channel.STATUS, status.model_dump_json(exclude={"truncated"}).encode())


class TcpRelay:
    """Plain data in both directions. An empty message closes the direction of its sender."""

    def __init__(self, subprotocol: str) -> None:
        self.subprotocol = subprotocol

    def input_of(self, received: bytes) -> Input | None:
        return (Channel.STDIN, received) if received else (Channel.CLOSE, STDIN_CLOSED[1:])

    def output_of(self, channel: Channel, data: bytes) -> bytes | None:
        if channel is Channel.CLOSE and data == STDOUT_CLOSED[1:]:
            return b""
        return data if data and channel is Channel.STDOUT else None

    def status_of(self, status: StreamStatus) -> bytes | None:
        return None


async def relay(websocket: WebSocket, stream: NodeStream, kind: Relay) -> None:
    """Accept the WebSocket, and copy until one side ends. The stream is then closed by the caller."""
    offered = websocket.scope["subprotocols"]
    await websocket.accept(subprotocol=kind.subprotocol if kind.subprotocol in offered else None)
    connection = connection_of(websocket.scope)
    output = asyncio.ensure_future(_send_output(websocket, stream, kind))
    received = asyncio.ensure_future(_receive_input(websocket, stream, kind))
    gone = asyncio.ensure_future(connection.lost.wait())
    revoked = asyncio.ensure_future(stream.revoked.wait())
    tasks: set[asyncio.Future[Any]] = {output, received, gone, revoked}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return
        status = await _status(output, received)
        async with asyncio.timeout(STATUS_WITHIN_S):
            await _end(websocket, status, kind)
    except (TimeoutError, WebSocketDisconnect, RuntimeError):
        connection.abort()
    finally:
        await cancelled(*tasks)


async def _status(
    output: asyncio.Future[StreamStatus], received: asyncio.Future[StreamStatus | None]
) -> StreamStatus | None:
    """The status to end with; None: the user has ended the stream.

    Raises:
        TimeoutError: the output has a status, but the user does not read.
        WebSocketDisconnect: the user has ended the connection.
    """
    if received.done() and not output.done():
        return received.result()
    async with asyncio.timeout(STATUS_WITHIN_S):
        return await output


async def _send_output(websocket: WebSocket, stream: NodeStream, kind: Relay) -> StreamStatus:
    while not isinstance(found := await stream.receive(), StreamStatus):
        if (sent := kind.output_of(*found)) is not None:
            await websocket.send_bytes(sent)
    return found


async def _receive_input(websocket: WebSocket, stream: NodeStream, kind: Relay) -> StreamStatus | None:
    """Copy until the user ends the connection (None), or a message is invalid (the status to end with)."""
    while True:
        received = await websocket.receive()
        if received["type"] == "websocket.disconnect":
            return None
        if received.get("bytes") is None:
            return StreamStatus.of_error("bad_message", "messages must be binary")
        try:
            found = kind.input_of(received["bytes"])
        except BadMessage as error:
            return StreamStatus.of_error("bad_message", str(error))
        if found is not None and not await stream.send(*found):
            # The output ends too, with the reason.
            await asyncio.Event().wait()


async def _end(websocket: WebSocket, status: StreamStatus | None, kind: Relay) -> None:
    if status is None:
        return
    if (sent := kind.status_of(status)) is not None:
        await websocket.send_bytes(sent)
    code, reason = _NORMAL, ""
    if status.reason is not None:
        code = _CLOSE_CODES.get(status.reason.code, _INTERNAL_ERROR)
        reason = f"{status.reason.code}: {status.reason.message}"
    await websocket.close(code, reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))


def _valid(kind: type[WindowSize | Signal], data: bytes) -> bytes:
    try:
        return kind.model_validate_json(data).model_dump_json().encode()
    except ValidationError as error:
        raise BadMessage(f"{data[:100]!r} is not valid: {error.errors()[0]['msg']}") from None
