"""uvicorn's HTTP/1.1 with patience that ends, and a problem document for what never reaches the app.

By itself uvicorn waits for ever for a head or a body. Here each has its time: who trickles is cut off, who is
merely slow is not. Readers that take nothing are left to the kernel (`listen_patiently`).
"""

import asyncio
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooring.api.http.edge import MAX_HEAD_BYTES, is_stream
from mooring.api.http.problems import headers_of, status_of
from mooring.core import ids
from mooring.core.errors import BadRequest, HeadersTooLarge, MooringError, RequestTimeout, Unavailable
from mooring.db.types import new_id
from mooring.schemas.base import PROBLEM_MEDIA_TYPE, Problem

_MOST_PIPELINED = 64
# A byte of a body may come in a chunk of its own, which makes six of it.
_FRAMING = 8
_TCP_NOTSENT_LOWAT = 25  # Linux; Python has no name for it
_UNSENT_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the other side, and for how many of them.

    Attributes:
        head_s: for a whole head, from the connection's beginning or the head's first byte.
        body_s: for a body that brings nothing; each `bytes_per_s` prolong it by a second.
        frames_s: between two pieces of a node's stream, which may go on for hours.
        linger_s: for the rest of a body that was refused, so that the refusal can be read.
        reader_s: for a reader that takes nothing of what waits for it, or is gone.
        connections: open at once. For one more an idle one is closed; where none is idle, it is refused.
    """

    head_s: float = 15.0
    body_s: float = 30.0
    bytes_per_s: int = 4096
    frames_s: float = 60.0
    linger_s: float = 5.0
    reader_s: float = 30.0
    connections: int = 8192  # of which each node holds two


def listen_patiently(listener: Any, patience: Patience) -> None:
    """Let the kernel end connections whose readers take nothing; those accepted here inherit it."""
    if sys.platform != "linux":
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(patience.reader_s * 1000)),
        (socket.TCP_KEEPIDLE, max(1, int(patience.reader_s))),
        (_TCP_NOTSENT_LOWAT, _UNSENT_BYTES),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


class _Phase(Enum):
    """What of a request is being received."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        patience: as above; the rest is uvicorn's.
    """

    def __init__(self, *args: Any, patience: Patience, **more: Any) -> None:
        super().__init__(*args, **more)
        self._patience = patience
        self._phase = _Phase.HEAD
        self._since = self._heard_at = 0.0
        self._received = 0  # in this phase, framing included
        self._of_body = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin(_Phase.HEAD)
        self._look_at_the_clock()
        if len(self.connections) > self._patience.connections and not self._displaced_an_idle_one():
            self._refuse(Unavailable("this server has as many connections open as it can bear"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.NOTHING and self._is_answered:
            self._begin(_Phase.HEAD)
        self._heard_at = self.loop.time()
        self._received += len(data)
        super().data_received(data)
        if self._phase is _Phase.NOTHING:
            self._disarm()
        elif self._deadline is None:
            self._look_at_the_clock()
        self._look_at_the_size()

    def on_message_begin(self) -> None:
        self._begin(_Phase.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._begin(_Phase.BODY)

    def on_body(self, body: bytes) -> None:
        self._of_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = _Phase.NOTHING
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _Phase.BODY:
            self._since = self.loop.time()
            self._look_at_the_clock()

    def _begin(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._received = self._of_body = 0

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _look_at_the_clock(self) -> None:
        """Cut the other side off, or look again when its time will be up."""
        self._disarm()
        if self._phase is _Phase.NOTHING or self.transport.is_closing():
            return
        left_s = self._ends_at() - self.loop.time()
        if left_s > 0:
            self._deadline = self.loop.call_later(left_s, self._look_at_the_clock)
        else:
            self._refuse(RequestTimeout(f"the request's {self._phase.value} did not arrive in time"))

    def _ends_at(self) -> float:
        if self._phase is _Phase.HEAD:
            return self._since + self._patience.head_s
        if self._is_answered:
            return self._since + self._patience.linger_s
        if self.flow.read_paused:
            self._since = self._heard_at = self.loop.time()  # it is we who do not take more just now
        if is_stream(self.scope["path"]):
            return self._heard_at + self._patience.frames_s
        return self._since + self._patience.body_s + self._of_body / self._patience.bytes_per_s

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look_at_the_size(self) -> None:
        """End what would fill the memory before a layer above sees it: endless heads, trailers, pipelines."""
        if self._received - _FRAMING * self._of_body > 2 * MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadersTooLarge(f"path, query and headers may have {MAX_HEAD_BYTES} bytes together"))
        if len(self.pipeline) > _MOST_PIPELINED:
            self.transport.abort()

    def _displaced_an_idle_one(self) -> bool:
        for other in self.connections:
            if isinstance(other, HttpProtocol) and other is not self and other._is_idle:
                other.transport.close()
                return True
        return False

    @property
    def _is_idle(self) -> bool:
        return self._is_answered and self._phase is not _Phase.BODY and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg, code="malformed_request"))

    def _refuse(self, error: MooringError) -> None:
        """End the connection, with an answer where none has begun."""
        if self._phase is _Phase.BODY:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._may_answer:
            self.transport.write(_answer(error))
        self.transport.close()

    @property
    def _may_answer(self) -> bool:
        if self._phase is _Phase.BODY:
            return not (self.cycle.response_started or self.pipeline)
        return self._is_answered


def _answer(error: MooringError) -> bytes:
    status, request_id = status_of(error), new_id(ids.REQUEST)
    problem = Problem(
        type=f"urn:mooring:error:{error.error_code}",
        title=error.title,
        status=status,
        detail=error.message,
        instance=None,
        code=error.error_code,
        request_id=request_id,
        retryable=error.retryable,
    )
    body = to_json(problem.model_dump(exclude={"errors"}))
    headers = {
        "Content-Type": PROBLEM_MEDIA_TYPE,
        "Content-Length": str(len(body)),
        "X-Request-Id": request_id,
        "Connection": "close",
        **headers_of(status, error),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {error.title}\r\n{lines}\r\n".encode() + body
