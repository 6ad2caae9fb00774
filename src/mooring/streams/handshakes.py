"""WebSocket handshakes, handled as the GET requests that they are.

So every middleware, route, check and error of the API applies to them. An operation that wants the WebSocket
returns a `StreamAnswer`; any other answer rejects the handshake. At other paths than those of streams, a
handshake is a GET request like any other, and its `Upgrade` is ignored.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from mooring_client.errors import BadRequest, UpgradeRequired

_WEBSOCKET: Final = "mooring.websocket"
_PATHS: Final = re.compile(
    r"/v1/instances/[^/]+/(exec|attach|ports/[^/]+)/stream|/agent/v1/streams/[^/]+|/v1/ssh"
)
_NEEDED: Final = frozenset({b"sec-websocket-key", b"sec-websocket-version"})


def is_handshake(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request that asks for an upgrade to WebSocket is for a stream, and complete."""
    return {name for name, _value in headers} >= _NEEDED and _PATHS.fullmatch(path) is not None


def as_request(scope: Scope, receive: Receive, send: Send) -> tuple[Scope, Receive, Send]:
    """Convert the scope and the functions of a handshake to those of a GET request."""
    request: Scope = {
        **scope,
        "type": "http",
        "method": "GET",
        "scheme": "https" if scope["scheme"] == "wss" else "http",
        "extensions": {},
        _WEBSOCKET: WebSocket(scope, receive, send),
    }
    return request, _Body(), _rejecting(send)


class StreamAnswer(Response):
    """Accepts the handshake by running `serve`, which must accept and close the WebSocket."""

    def __init__(self, serve: Callable[[WebSocket], Awaitable[None]]) -> None:
        super().__init__(status_code=101)
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope[_WEBSOCKET])


def require(request: Request, subprotocol: str) -> None:
    """Check that this request is a handshake for the subprotocol. A client may also offer none.

    Raises:
        UpgradeRequired: it is not a handshake.
        BadRequest: the client offers other subprotocols only.
    """
    websocket: WebSocket | None = request.scope.get(_WEBSOCKET)
    if websocket is None:
        raise UpgradeRequired(
            f"connect with a WebSocket client, with the subprotocol {subprotocol} and the header "
            "Authorization: Bearer <key>"
        )
    offered = websocket.scope["subprotocols"]
    if offered and subprotocol not in offered:
        raise BadRequest(f"the client does not offer the only subprotocol here, {subprotocol}")


class _Body:
    """An empty body, from a client that stays connected."""

    def __init__(self) -> None:
        self._is_read = False

    async def __call__(self) -> Message:
        if self._is_read:
            await asyncio.Event().wait()
        self._is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}


def _rejecting(send: Send) -> Send:
    """Send an HTTP answer as the rejection of a handshake."""

    async def reject(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return reject
