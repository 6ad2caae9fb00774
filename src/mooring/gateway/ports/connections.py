"""One client connection of the port proxy: request after request, until one side ends it."""

import asyncio
import logging
import re
import socket
import struct
import sys
from contextlib import aclosing, suppress
from typing import Final

import h11

from mooring.auth.rate_limits import network_of
from mooring.gateway.ports import answers, callers, heads
from mooring.gateway.ports.callers import PortUser
from mooring.gateway.ports.calls import PortCall
from mooring.gateway.ports.exchange import Forwarded, ProgramExchange, forwarded
from mooring.gateway.ports.heads import MAX_HEAD_BYTES, READ_BYTES, Fields
from mooring.gateway.ports.programs import ProgramConnection, ProgramGone
from mooring.gateway.ports.shared import ProxyShared
from mooring_client.errors import BadGateway, MalformedRequest, MooringError

KEPT_ALIVE_S: Final = 75.0
HEAD_S: Final = 15.0
# For the rest of a body after the answer, so that the client can read the answer.
_LINGER_S: Final = 2.0
# After an upgrade, one side has closed its direction.
_HALF_CLOSED_S: Final = 60.0
_NO_LINGER: Final = struct.pack("ii", 1, 0)  # the kernel then resets the connection
_HOST: Final = re.compile(rb"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")

# States of a client that may still send something of its request.
_UNREAD: Final = frozenset({h11.IDLE, h11.SEND_BODY, h11.ERROR})

log = logging.getLogger(__name__)


class ProxyConnection(asyncio.StreamReaderProtocol):
    """A client. Its end cancels what is done for it."""

    def __init__(self, shared: ProxyShared) -> None:
        self._shared = shared
        self._reader = asyncio.StreamReader(limit=READ_BYTES)
        super().__init__(self._reader)
        self._task: asyncio.Task[None] | None = None
        self._has_half_close = False
        self._peer = ""
        self.is_idle = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._client = transport
        self._writer = asyncio.StreamWriter(transport, self, self._reader, loop)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else ""
        if not self._shared.connected(self, self._peer):
            transport.abort()
            return
        self._task = loop.create_task(self._serve())

    def eof_received(self) -> bool:
        super().eof_received()
        if not self._has_half_close and not self.is_idle:
            self._cancel()
        return self._has_half_close

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._shared.lost(self, self._peer)
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """End the connection, even if the client reads nothing. Half an answer ends visibly."""
        # The number of a closed socket may be that of another one by now.
        if not self.is_idle and not self._client.is_closing():
            _reset_at_close(self._client)
        self._client.abort()

    async def _serve(self) -> None:
        try:
            await self._serve_requests()
        except (OSError, asyncio.CancelledError):
            self.abort()
        except Exception:
            log.exception("a connection of the port proxy has failed")
            self.abort()
        finally:
            self._client.close()

    async def _serve_requests(self) -> None:
        begun: bytes | None = b""
        while begun is not None and not (self._shared.is_closing and not begun):
            self.is_idle = True
            server = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
            try:
                head = await heads.read_head(self._reader, begun, KEPT_ALIVE_S, HEAD_S)
                if head is None:
                    return
                self.is_idle = False
                server.receive_data(head)
                request, fields = _request(server)
            except MooringError as error:
                await self._refuse(server, error, is_head=False)
                return
            begun = await self._answered(server, request, fields)

    async def _answered(self, server: h11.Connection, request: h11.Request, fields: Fields) -> bytes | None:
        """Answer a request. Returns what follows it; None: the connection ends."""
        is_head = request.method == b"HEAD"
        try:
            call = self._shared.call_of(request, fields, self._peer)
            if isinstance(call, bytes):
                await self._send(server, answers.redirect(call, None, 308), is_head=is_head)
                return self._next(server)
            with self._shared.requests.from_network(network_of(call.request.client)):
                return await self._called(server, request, call)
        except (ProgramGone, BadGateway, MooringError) as error:
            if isinstance(error, ProgramGone):
                error = BadGateway("the program has closed the connection without an answer")
            await self._refuse(server, error, is_head=is_head)
            return self._next(server)

    async def _called(self, server: h11.Connection, request: h11.Request, call: PortCall) -> bytes | None:
        user = await self._shared.users.authorized(call.request)
        query = callers.without_token(call.request.query)
        if user.is_redirected:
            path = b"/" + call.whole_path.lstrip(b"/\\") + (b"?" + query if query else b"")
            await self._send(
                server, answers.redirect(path, user.cookie, 303), is_head=request.method == b"HEAD"
            )
            return self._next(server)
        target = call.request.path + (b"?" + query if query is not None else b"")
        sent = forwarded(
            request,
            call.request.fields,
            user,
            target=target,
            addresses=call.addresses,
            scheme=self._shared.urls.scheme,
            prefix=call.request.prefix,
        )
        with self._shared.requests.to_project(user.port.project_id):
            return await self._exchanged(server, user, sent)

    async def _exchanged(self, server: h11.Connection, user: PortUser, sent: Forwarded) -> bytes | None:
        for is_retry in (False, True):
            connection = await self._shared.programs.connection(
                user, idle_at_most_s=0 if is_retry else sent.idle_at_most_s
            )
            connection.used_by(self.abort)
            exchange = ProgramExchange(server, self._reader, connection, sent, user.cookie)
            is_kept = False
            try:
                await self._copy_answer(exchange)
                if exchange.is_upgraded:
                    await self._copy_both(server, exchange, connection)
                    return None
                is_kept = exchange.is_reusable
                break
            except ProgramGone:
                # The program has closed the connection just when the request was sent.
                if exchange.has_answer or not connection.is_reused or is_retry or not sent.may_be_repeated:
                    if exchange.has_begun:
                        raise ConnectionResetError from None
                    raise
            except (BadGateway, MooringError):
                if exchange.has_begun:
                    # The client must not take the part for the whole.
                    raise ConnectionResetError from None
                raise
            finally:
                if is_kept:
                    self._shared.programs.keep(connection)
                else:
                    self._shared.programs.discard(connection)
        return await self._after(server)

    async def _copy_answer(self, exchange: ProgramExchange) -> None:
        async with aclosing(exchange.answer()) as pieces:
            async for piece in pieces:
                await self._write(piece)

    async def _after(self, server: h11.Connection) -> bytes | None:
        """What follows the request; None: the connection ends."""
        if server.their_state in _UNREAD:
            await self._linger()
            return None
        return self._next(server)

    def _next(self, server: h11.Connection) -> bytes | None:
        is_kept = server.our_state is h11.DONE and server.their_state is h11.DONE
        return server.trailing_data[0] if is_kept else None

    async def _refuse(self, server: h11.Connection, error: MooringError, *, is_head: bool) -> None:
        if server.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            raise ConnectionResetError
        await self._send(server, answers.of_error(error), is_head=is_head)
        if server.their_state in _UNREAD:
            await self._linger()

    async def _send(
        self, server: h11.Connection, answer: tuple[int, answers.Head, bytes], *, is_head: bool
    ) -> None:
        closes = server.their_state in _UNREAD or self._shared.is_closing
        await self._write(answers.sent(server, answer, is_head=is_head, closes=closes))

    async def _write(self, data: bytes) -> None:
        """Wait until the client has read most of it. Raises OSError: it has ended the connection."""
        if self._client.is_closing():
            raise ConnectionResetError
        self._writer.write(data)
        await self._writer.drain()

    async def _linger(self) -> None:
        """Read what the client still sends, so that it reads the answer instead of a reset."""
        with suppress(OSError, RuntimeError, TimeoutError):  # RuntimeError: it is closed
            self._writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                while await self._reader.read(READ_BYTES):
                    pass

    async def _copy_both(
        self, server: h11.Connection, exchange: ProgramExchange, connection: ProgramConnection
    ) -> None:
        """Copy bytes after an upgrade, until both directions have ended."""
        self._has_half_close = True
        _wait_for_readers(self._client)
        sending = asyncio.ensure_future(self._copy_to_program(server.trailing_data[0], connection))
        receiving = asyncio.ensure_future(self._copy_to_client(exchange.leftover, connection))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Even if sending has failed, the rest of what the program has sent arrives, and how it ended.
                await asyncio.wait({receiving}, timeout=_HALF_CLOSED_S if sending.exception() else None)
            elif not connection.has_ended:
                await asyncio.wait({sending}, timeout=_HALF_CLOSED_S)
            if not receiving.done() or receiving.exception() is not None:
                # The client must not take the part for the whole.
                raise ConnectionResetError
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _copy_to_program(self, begun: bytes, connection: ProgramConnection) -> None:
        data = begun or await self._reader.read(READ_BYTES)
        while data:
            await connection.send(data)
            data = await self._reader.read(READ_BYTES)
        await connection.end_input()

    async def _copy_to_client(self, begun: bytes, connection: ProgramConnection) -> None:
        data = begun or await connection.receive()
        while data:
            await self._write(data)
            data = await connection.receive()
        with suppress(OSError, RuntimeError):  # RuntimeError: it is closed
            self._writer.write_eof()


def _reset_at_close(transport: asyncio.Transport) -> None:
    """For HTTP/1.0, and after an upgrade, the usual end of a connection would be that of the answer."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _wait_for_readers(transport: asyncio.Transport) -> None:
    """A client of a WebSocket may read nothing for hours."""
    connection = transport.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def _request(server: h11.Connection) -> tuple[h11.Request, Fields]:
    """The request and its fields. Raises MalformedRequest."""
    try:
        request = server.next_event()
    except h11.RemoteProtocolError as error:
        raise MalformedRequest(f"the request is not valid HTTP: {error}") from None
    if not isinstance(request, h11.Request):
        raise MalformedRequest("the request is not valid HTTP")
    fields = list(request.headers)  # once: reading the list of h11 is slow
    heads.require_one_framing(fields)
    if request.http_version not in {b"1.0", b"1.1"}:
        raise MalformedRequest("this proxy speaks HTTP/1.1")
    if not request.target.startswith(b"/") or request.method == b"CONNECT":
        raise MalformedRequest("the target of the request must be a path")
    if not _HOST.fullmatch(heads.value_of(fields, b"host") or b""):
        raise MalformedRequest("the Host header names no host")
    if not heads.has_body(fields):
        server.next_event()  # the end of the request
    return request, fields
