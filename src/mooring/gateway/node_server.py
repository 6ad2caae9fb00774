"""The HTTP listener of a gateway."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from mooring.settings import Settings
from mooring.streams.http_protocol import (
    ConnectionLimits,
    max_connections,
    set_kernel_timeouts,
    url_of,
    uvicorn_options,
)
from mooring.streams.websockets import StreamProtocol
from mooring_client.errors import MooringError

_GRACE_S = 2
_BACKLOG = 2048


class _NodeProtocol(StreamProtocol):
    """A node's stream. It is read all the time, so a connection that has ended is noticed without pings."""

    ping_every_s = 30.0


class NodeServer(uvicorn.Server):
    """uvicorn in a process that handles signals itself.

    Raises:
        OSError: cannot use the address.
    """

    def __init__(self, settings: Settings, app: ASGIApp) -> None:
        limits = ConnectionLimits(connections=max_connections())
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.gateway_host,
                port=settings.gateway_port,
                ws=_NodeProtocol,
                lifespan="off",
                timeout_graceful_shutdown=_GRACE_S,
                **uvicorn_options(settings, limits, _answer),
            )
        )
        self._socket = _bound(settings.gateway_host, settings.gateway_port, limits)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return url_of(host, port)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set."""
        await self.serve([self._socket])


def _bound(host: str, port: int, limits: ConnectionLimits) -> socket.socket:
    """Raises OSError: cannot use the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    set_kernel_timeouts(bound, limits)
    return bound


def _answer(error: MooringError) -> bytes:
    body = f"{error.message}\n".encode()
    head = (
        f"HTTP/1.1 {error.status} {error.title}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
