"""uvicorn's HTTP/1.1 protocol with timeouts, and answers for requests that never reach the app.

uvicorn itself waits forever for a head or a body. Here each part of a request has a timeout that disconnects
clients that trickle bytes but not slow ones. The kernel closes connections whose clients do not read
(`set_kernel_timeouts`). tests/streams/test_http_protocol.py lists the members of uvicorn used here.
"""

import asyncio
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooring.settings import Settings
from mooring.streams.handshakes import is_handshake
from mooring_client import errors
from mooring_client.errors import MooringError
from mooring_client.stream_messages import MAX_MESSAGE_BYTES

MAX_HEAD_BYTES = 64 * 1024
_MAX_PIPELINED = 64
_MAX_OPEN_FILES = 16_384
# The most received bytes for each byte of a body: a chunk of one byte takes six.
_FRAMING = 8
_TCP_NOTSENT_LOWAT = 25  # Linux; Python has no name for it
_UNSENT_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts of a connection, and how many connections may be open.

    Attributes:
        head_s: for a whole head, from the start of the connection or the first byte of the head.
        body_s: for a whole body; every `bytes_per_s` bytes add a second.
        linger_s: for the rest of a rejected body, so that the client can read the answer.
        reader_s: for a client that reads nothing of what is sent, or is gone.
        connections: how many may be open. Beyond that an idle one is closed, or else the new one rejected.
    """

    head_s: float = 15.0
    body_s: float = 30.0
    bytes_per_s: int = 4096
    linger_s: float = 5.0
    reader_s: float = 30.0
    connections: int = 8192  # each node takes two


def max_connections() -> int:
    """Raise the limit on open files as far as allowed, and return how many connections fit in that limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return min(ConnectionLimits().connections, files // 2)


def set_kernel_timeouts(listener: Any, limits: ConnectionLimits) -> None:
    """Let the kernel end connections whose clients read nothing; accepted sockets inherit the options."""
    if sys.platform != "linux":
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(limits.reader_s * 1000)),
        (socket.TCP_KEEPIDLE, max(1, int(limits.reader_s))),
        (_TCP_NOTSENT_LOWAT, _UNSENT_BYTES),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def uvicorn_options(
    settings: Settings, limits: ConnectionLimits, answer: Callable[[MooringError], bytes]
) -> dict[str, Any]:
    """The options of uvicorn that all our listeners have in common.

    Args:
        answer: as that of `HttpProtocol`.
    """
    return {
        "log_level": "warning",
        "access_log": False,
        "http": partial(HttpProtocol, limits=limits, answer=answer),  # uvicorn only calls it
        "ws_max_size": MAX_MESSAGE_BYTES,
        "ws_per_message_deflate": False,
        "server_header": False,
        "proxy_headers": settings.behind_tls_proxy,
        "forwarded_allow_ips": settings.trusted_proxies,
    }


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Receiving(Enum):
    """The part of a request that is being received."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class HttpProtocol(HttpToolsProtocol):
    """One connection. The other arguments are uvicorn's.

    Args:
        answer: the bytes of the answer to a request that never reaches the app. The connection is closed.
    """

    def __init__(
        self, *args: Any, limits: ConnectionLimits, answer: Callable[[MooringError], bytes], **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._limits, self._answer = limits, answer
        self._receiving = _Receiving.HEAD
        self._since = 0.0
        self._received = 0  # of this part, framing included
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin(_Receiving.HEAD)
        self._check_deadline()
        if len(self.connections) > self._limits.connections and not self._close_idle_connection():
            self._reject(errors.Unavailable("this server has too many open connections; try again soon"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._receiving is _Receiving.NOTHING and self._is_answered:
            self._begin(_Receiving.HEAD)
        self._received += len(data)
        super().data_received(data)
        if self._receiving is _Receiving.NOTHING:
            self._cancel_deadline()
        elif self._timer is None:
            self._check_deadline()
        self._check_size()

    def _should_upgrade(self) -> bool:
        # uvicorn asks before it sets the path of the scope.
        path = httptools.parse_url(self.url).path.decode("ascii")
        return super()._should_upgrade() and is_handshake(path, self.scope["headers"])

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to a `StreamProtocol`, which has timeouts of its own."""
        self._receiving = _Receiving.NOTHING
        self._cancel_deadline()
        connection = self.transport.get_extra_info("socket")
        if sys.platform == "linux" and connection is not None:
            # A program may read nothing for hours, and then neither does the server.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._begin(_Receiving.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._begin(_Receiving.BODY)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving = _Receiving.NOTHING
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._receiving is _Receiving.BODY:
            self._since = self.loop.time()
            self._check_deadline()

    def _begin(self, part: _Receiving) -> None:
        self._receiving = part
        self._since = self.loop.time()
        self._received = self._body_bytes = 0

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _check_deadline(self) -> None:
        """End the connection if its deadline has passed, else check again at the deadline."""
        self._cancel_deadline()
        if self._receiving is _Receiving.NOTHING or self.transport.is_closing():
            return
        remaining_s = self._deadline_at() - self.loop.time()
        if remaining_s > 0:
            self._timer = self.loop.call_later(remaining_s, self._check_deadline)
        else:
            self._reject(
                errors.RequestTimeout(f"the request's {self._receiving.value} did not arrive in time")
            )

    def _deadline_at(self) -> float:
        if self._receiving is _Receiving.HEAD:
            return self._since + self._limits.head_s
        if self._is_answered:
            return self._since + self._limits.linger_s
        if self.flow.read_paused:
            self._since = self.loop.time()  # the app has paused reading
        return self._since + self._limits.body_s + self._body_bytes / self._limits.bytes_per_s

    def _cancel_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_size(self) -> None:
        """Reject what would fill the memory below the app: endless heads, trailers and pipelines."""
        if (
            self._received - _FRAMING * self._body_bytes > 2 * MAX_HEAD_BYTES
            and not self.transport.is_closing()
        ):
            self._reject(
                errors.HeadersTooLarge(
                    f"path, query and headers may have {MAX_HEAD_BYTES} bytes together at most"
                )
            )
        if len(self.pipeline) > _MAX_PIPELINED:
            self.transport.abort()

    def _close_idle_connection(self) -> bool:
        for other in self.connections:
            if isinstance(other, HttpProtocol) and other is not self and other._is_idle:
                other.transport.close()
                return True
        return False

    @property
    def _is_idle(self) -> bool:
        idle = self._is_answered and self._receiving is not _Receiving.BODY
        return idle and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        self._reject(errors.MalformedRequest(msg))

    def _reject(self, error: MooringError) -> None:
        """Close the connection, after the answer if none has begun."""
        if self._receiving is _Receiving.BODY:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._may_answer:
            self.transport.write(self._answer(error))
        self.transport.close()

    @property
    def _may_answer(self) -> bool:
        if self._receiving is _Receiving.BODY:
            return not (self.cycle.response_started or self.pipeline)
        return self._is_answered
