"""uvicorn's WebSocket protocol for streams that last for days, whose two sides may each stop reading.

tests/streams/test_websockets.py lists the members of uvicorn used here.
"""

import asyncio
from typing import Any, Final

from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

# A client that answers no ping for so long is gone. Nodes send keepalive messages instead.
SILENCE_S: Final = 60.0

_CLOSED_WITHIN_S: Final = 2.0
_CONNECTION: Final = "mooring.connection"


class StreamProtocol(WebSocketsSansIOProtocol):
    """One connection. The arguments are uvicorn's.

    uvicorn waits for the answer to a ping before it sends another. Here pings continue, because only a write
    detects that a client has ended the connection while nothing is read from it.
    """

    ping_every_s: float = 5.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.lost = asyncio.Event()
        self._heard_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"][_CONNECTION] = self

    def handle_pong(self, event: Frame) -> None:
        """Nothing to do: any data shows that the client is there."""

    def start_keepalive(self) -> None:
        self.ping_timer = self.loop.call_later(self.ping_every_s, self._ping)

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            # A rejection completes the handshake too; uvicorn would log an error.
            self.handshake_complete = True

    def abort(self) -> None:
        """End the connection, even if its client reads nothing."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Called when the server shuts down. Accepted streams end by themselves, with a status."""
        if not self.handshake_complete:
            super().shutdown()

    def _ping(self) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        if self.read_paused:
            self._heard_at = self.loop.time()
        if self.loop.time() - self._heard_at > SILENCE_S:
            self.abort()
            return
        if self.writable.is_set():
            self.conn.send_ping(b"")
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.ping_timer = self.loop.call_later(self.ping_every_s, self._ping)


async def disconnect(websocket: WebSocket) -> None:
    """Close a WebSocket, also one whose client reads nothing, so that a close frame cannot be sent."""
    try:
        async with asyncio.timeout(_CLOSED_WITHIN_S):
            await websocket.close()
    except TimeoutError:
        connection_of(websocket.scope).abort()
    except (RuntimeError, WebSocketDisconnect):
        return  # the client has ended the connection


def connection_of(scope: Scope) -> StreamProtocol:
    """The connection of an accepted WebSocket."""
    connection: StreamProtocol = scope["state"][_CONNECTION]
    return connection
