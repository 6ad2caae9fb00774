"""The outermost middleware: request ids, size limits, NUL characters, and unexpected exceptions."""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from mooring.api.http.problems import on_bug, problem_response
from mooring.core import ids
from mooring.db.types import new_id
from mooring.streams import handshakes
from mooring.streams.http_protocol import MAX_HEAD_BYTES
from mooring_client.errors import BadRequest, HeadersTooLarge, MooringError, TooLarge

MAX_HEADERS = 128
MAX_PARAMETERS = 256
MAX_BODY_BYTES = 1024 * 1024
MAX_REPORT_BYTES = 16 * 1024 * 1024
_REPORTS = frozenset({"/agent/v1/sync", "/agent/v1/heartbeat"})
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")

_SAFE_DEFAULTS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Edge:
    """The middleware, as plain ASGI: Starlette's `BaseHTTPMiddleware` would buffer streams."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope, receive, send = handshakes.as_request(scope, receive, send)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        began = False

        async def send_with_id(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                rates = scope["state"].get("rate_headers", ())
                message["headers"] = [
                    *_with_safe_defaults(message["headers"]), (b"x-request-id", request_id.encode()), *rates,
                ]  # fmt: skip
            await send(message)

        rejection = _rejection(scope)
        if rejection is not None:
            response = problem_response(Request(scope), rejection)
            await response(scope, receive, send_with_id)
            return
        try:
            await self.app(scope, _limited(receive, _limit(scope)), send_with_id)
        except ClientDisconnect:
            return  # the client cannot receive an answer
        except Exception as error:
            # Starlette's own handler is outside of this middleware: its answer would have no request id, and
            # it raises the exception again, which closes the connection.
            if began:
                raise
            await on_bug(Request(scope), error)(scope, receive, send_with_id)


def _with_safe_defaults(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Add the default headers that an operation did not set.

    `nosniff`: browsers must not render tenants' log text as a page. `no-store`: answers are for their caller
    only, and some show a key.
    """
    named = {name for name, _value in headers}
    return headers + [(name, value) for name, value in _SAFE_DEFAULTS if name not in named]


def _request_id(scope: MutableMapping[str, Any]) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode(
        "latin-1"
    )
    return given if _REQUEST_ID.match(given) else new_id(ids.REQUEST)


def _rejection(scope: MutableMapping[str, Any]) -> MooringError | None:
    exceeded = _exceeded_limit(scope)
    if exceeded is not None:
        return HeadersTooLarge(exceeded)
    if b"%00" in scope.get("query_string", b"") or "\x00" in scope["path"]:
        return BadRequest("the path or query contains a NUL character")
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not length.isdigit():
        return BadRequest("Content-Length is not a number")
    if int(length) > _limit(scope):
        return _too_large(_limit(scope))
    return None


def _exceeded_limit(scope: MutableMapping[str, Any]) -> str | None:
    if _head_bytes(scope) > MAX_HEAD_BYTES:
        return f"path, query and headers may have {MAX_HEAD_BYTES} bytes together at most"
    if len(scope["headers"]) > MAX_HEADERS:
        return f"a request may have {MAX_HEADERS} headers at most"
    if scope.get("query_string", b"").count(b"&") >= MAX_PARAMETERS:
        return f"a query may have {MAX_PARAMETERS} parameters at most"
    return None


def _head_bytes(scope: MutableMapping[str, Any]) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) + headers


def _limit(scope: MutableMapping[str, Any]) -> int:
    path: str = scope["path"]
    return MAX_REPORT_BYTES if path in _REPORTS else MAX_BODY_BYTES


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"a request body may have {limit} bytes at most")


def _limited(receive: Receive, limit: int) -> Receive:
    """Enforce the limit on chunked bodies too, which have no Content-Length."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _too_large(limit)
        return message

    return limited
