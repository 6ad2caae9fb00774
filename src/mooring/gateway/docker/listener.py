"""Accepts Docker clients, authenticates each request, and finds its operation."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Final

from mooring.auth.rate_limits import ActionClass, network_of
from mooring.db import failures
from mooring.gateway.docker import (
    archives,
    attached,
    container_events,
    execs,
    http,
    lifecycle,
    outputs,
    system,
)
from mooring.gateway.docker.http import ClientGone, DockerConnection, DockerRequest
from mooring.gateway.docker.shared import DockerCall, DockerShared, bearer
from mooring_client.errors import BadRequest, MooringError, NotFound

Handler = Callable[[DockerCall, re.Match[str]], Awaitable[None]]

_BACKLOG: Final = 2048
_READ_LIMIT: Final = 64 * 1024
_WRITE_LIMIT: Final = 128 * 1024
_CONTAINER: Final = r"/containers/(?P<id>[^/]{1,200})"
_EXEC: Final = r"/exec/(?P<id>[0-9a-f]{1,64})"

_ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET|HEAD", r"/_ping", system.ping),
    ("GET", r"/version", system.version),
    ("GET", r"/info", system.info),
    ("GET", r"/events", container_events.events),
    ("GET", r"/containers/json", system.listed),
    ("POST", r"/containers/create", lifecycle.create),
    ("GET", _CONTAINER + r"/json", system.inspected),
    ("POST", _CONTAINER + r"/start", lifecycle.start),
    ("POST", _CONTAINER + r"/stop", lifecycle.stop),
    ("POST", _CONTAINER + r"/restart", lifecycle.restart),
    ("POST", _CONTAINER + r"/kill", lifecycle.kill),
    ("POST", _CONTAINER + r"/wait", lifecycle.wait),
    ("POST", _CONTAINER + r"/resize", lifecycle.resize),
    ("POST", _CONTAINER + r"/rename", lifecycle.rename),
    ("POST", _CONTAINER + r"/attach", attached.attach),
    ("POST", _CONTAINER + r"/exec", execs.create),
    ("GET", _CONTAINER + r"/logs", outputs.logs),
    ("GET", _CONTAINER + r"/top", outputs.top),
    ("GET", _CONTAINER + r"/stats", outputs.stats),
    ("HEAD", _CONTAINER + r"/archive", archives.stat),
    ("GET", _CONTAINER + r"/archive", archives.read),
    ("PUT", _CONTAINER + r"/archive", archives.write),
    ("DELETE", _CONTAINER, lifecycle.remove),
    ("POST", _EXEC + r"/start", execs.start),
    ("POST", _EXEC + r"/resize", execs.resize),
    ("GET", _EXEC + r"/json", execs.inspect),
    ("GET", r"/images/json", system.images),
    ("POST", r"/images/create", system.pull),
    ("GET", r"/images/(?P<name>.{1,300})/json", system.image),
    ("GET", r"/volumes", system.no_volumes),
    ("GET", r"/networks", system.networks),
    ("GET", r"/networks/(?P<name>[^/]+)", system.network),
    ("DELETE", r"/(?P<kind>network|volume)s/(?!(?:default|bridge)$)(?P<name>[^/]+)", system.no_such),
    (
        "GET",
        r"/(?P<kind>volume|plugin|service|task|node|secret|config)s/(?P<name>[^/]+)(?:/json)?",
        system.no_such,
    ),
    (r"[A-Z]{1,16}", r"/.*", system.not_implemented),
)
_COMPILED: Final = tuple((re.compile(m), re.compile(p, re.DOTALL), handler) for m, p, handler in _ROUTES)

log = logging.getLogger(__name__)


class DockerListener:
    """Accepts clients until it is closed."""

    def __init__(self, shared: DockerShared) -> None:
        self._shared = shared
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._serving)

    async def listen(self, host: str, port: int) -> None:
        """Raises OSError: cannot use the address."""
        self._server = await asyncio.start_server(
            self._accept, host, port, backlog=_BACKLOG, limit=_READ_LIMIT
        )

    def close(self) -> None:
        """Accept no more clients."""
        if self._server is not None:
            self._server.close()

    async def end(self) -> None:
        """End all connections."""
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        peer = writer.get_extra_info("peername")
        address = str(peer[0]) if peer else None
        writer.transport.set_write_buffer_limits(high=_WRITE_LIMIT)
        connection = DockerConnection(reader, writer)
        try:
            if self._shared.connections.connected(connection, network_of(address)):
                await self._serve(connection, address)
        except (ClientGone, TimeoutError):
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()  # the gateway ends
        except Exception:
            log.exception("a connection of a Docker client ends, because serving it failed")
            writer.transport.abort()
        finally:
            self._serving.discard(task)
            self._shared.connections.lost(connection)
            writer.close()

    async def _serve(self, connection: DockerConnection, address: str | None) -> None:
        while True:
            try:
                request = await connection.next_request()
                if request is None:
                    return
                await self._answer(connection, request, address)
            except MooringError as error:
                if connection.has_answered:
                    raise ClientGone from error  # an answer that is cut off is the only way to say so
                await connection.skip_body()
                retry = [("Retry-After", str(error.retry_after_s))] if error.retry_after_s else []
                if not connection.is_idle:
                    retry.append(("Connection", "close"))
                await connection.answer(http.status_of(error), http.error_document(error), retry)
            await connection.skip_body()
            if not connection.can_go_on:
                await connection.linger()
                return

    async def _answer(
        self, connection: DockerConnection, request: DockerRequest, address: str | None
    ) -> None:
        with failures.as_unavailable():
            call = await self._call(connection, request, address)
            handler, match = _handler_of(request)
            await handler(call, match)

    async def _call(
        self, connection: DockerConnection, request: DockerRequest, address: str | None
    ) -> DockerCall:
        """Raises Unauthorized, TooManyRequests, TooManyStreams."""
        shared = self._shared
        secret = bearer(request)
        caller = await shared.credentials.caller(secret, address)
        shared.connections.authenticate(connection, [caller.limited_as])
        call = DockerCall(shared, connection, request, secret, caller, address)
        call.count(ActionClass.READ if request.method in {"GET", "HEAD"} else ActionClass.WRITE)
        return call


def _handler_of(request: DockerRequest) -> tuple[Handler, re.Match[str]]:
    """Raises NotFound, BadRequest."""
    if len(request.path) > 1024:
        raise BadRequest("the path is too long")
    for methods, path, handler in _COMPILED:
        if methods.fullmatch(request.method) and (match := path.fullmatch(request.path)) is not None:
            return handler, match
    raise NotFound("page not found")
