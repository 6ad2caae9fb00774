"""The HTTP listener of a gateway."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from mooring.core.errors import MooringError
from mooring.core.stream_messages import MAX_MESSAGE_BYTES
from mooring.settings import Settings
from mooring.streams.http_protocol import ConnectionLimits, HttpProtocol, max_connections, set_kernel_timeouts
from mooring.streams.websockets import StreamProtocol

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
                log_level="warning",
                access_log=False,
                # uvicorn only calls it.
                http=partial(HttpProtocol, limits=limits, answer=_answer),  # type: ignore[arg-type]
                ws=_NodeProtocol,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                server_header=False,
                lifespan="off",
                proxy_headers=settings.behind_tls_proxy,
                forwarded_allow_ips=settings.trusted_proxies,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._socket = _bound(settings.gateway_host, settings.gateway_port, limits)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

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
