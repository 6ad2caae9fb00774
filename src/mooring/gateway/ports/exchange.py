"""One request and its answer, between a client and a program."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

import h11

from mooring.gateway.ports import cookies, heads
from mooring.gateway.ports.callers import PortUser
from mooring.gateway.ports.heads import MAX_HEAD_BYTES, READ_BYTES, Fields
from mooring.gateway.ports.programs import FRESH_S, IDLE_S, ProgramConnection, ProgramGone
from mooring_client.errors import BadGateway, MalformedRequest, RequestTimeout

# How long the head of an answer may take from its first byte. Before that, a program may think for hours.
ANSWER_HEAD_S: Final = 20.0
# A client that sends nothing of the body for so long is gone.
BODY_SILENCE_S: Final = 300.0
_MAX_INFORMATIONAL: Final = 16
_IDEMPOTENT: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
# Fields with which a program would affect other programs of the same host, or send clients past the proxy.
_NEVER: Final = frozenset({b"alt-svc"})
_NOT_ON_SHARED_HOST: Final = _NEVER | {
    b"service-worker-allowed",
    b"clear-site-data",
    b"strict-transport-security",
}


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request as the program gets it.

    Attributes:
        prefix: of the path that the program does not see; empty: the program has the host alone.
        upgrade: the protocol to switch to; null: none.
    """

    request: h11.Request
    prefix: str
    upgrade: bytes | None
    has_body: bool

    @property
    def may_be_repeated(self) -> bool:
        """Whether the request can be sent again if an idle connection turns out to have ended."""
        return self.request.method in _IDEMPOTENT and not self.has_body

    @property
    def idle_at_most_s(self) -> float:
        """How long a connection to the program may have been idle before it takes this request.

        The program may close an idle connection just when the request is sent. Then nobody knows whether it
        has acted on it, so a request that may not be repeated is lost.
        """
        if self.upgrade is not None:
            return 0
        return IDLE_S if self.may_be_repeated else FRESH_S


def forwarded(
    request: h11.Request,
    fields: Fields,
    user: PortUser,
    *,
    target: bytes,
    addresses: str,
    scheme: str,
    prefix: str,
) -> Forwarded:
    """What the program gets of a request: nothing of our own credentials, and nothing of this hop."""
    host = heads.value_of(fields, b"host") or b""
    passed = heads.for_program(fields, address=addresses, host=host, scheme=scheme, prefix=prefix.rstrip("/"))
    if user.has_our_authorization:
        passed = [field for field in passed if field[0] != b"authorization"]
    if any(name == b"cookie" for name, _value in passed):
        cookie = cookies.without_ours(heads.values_of(passed, b"cookie"))
        passed = [field for field in passed if field[0] != b"cookie"]
        passed += [(b"cookie", cookie)] if cookie is not None else []
    if heads.value_of(fields, b"transfer-encoding") is not None:
        passed.append((b"transfer-encoding", b"chunked"))
    upgrade = heads.upgrade_of(request.method, fields)
    if upgrade is not None:
        passed += [(b"connection", b"Upgrade"), (b"upgrade", heads.value_of(fields, b"upgrade") or b"")]
    sent = h11.Request(method=request.method, target=target, headers=passed)
    return Forwarded(sent, prefix, upgrade, heads.has_body(fields))


class ProgramExchange:
    """Sends a request to the program, and yields the bytes of the answer for the client.

    Args:
        server: the client's side, which has received the request's head.
        reader: the client's connection, from which the body comes.
    """

    def __init__(
        self,
        server: h11.Connection,
        reader: asyncio.StreamReader,
        connection: ProgramConnection,
        sent: Forwarded,
        cookie: bytes | None,
    ) -> None:
        self._server, self._reader = server, reader
        self._connection, self._sent, self._cookie = connection, sent, cookie
        self._program = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._body: asyncio.Task[None] | None = None
        self.has_answer = False  # anything was received from the program
        self.has_begun = False  # anything was yielded
        self.is_upgraded = False

    @property
    def leftover(self) -> bytes:
        """After an upgrade: what the program has sent of the new protocol."""
        return self._program.trailing_data[0]

    @property
    def is_reusable(self) -> bool:
        """Whether the program waits for the next request on the connection."""
        program = self._program
        is_done = program.our_state is h11.DONE and program.their_state is h11.DONE
        return is_done and not program.trailing_data[0]

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """The answer, piece by piece, as the program sends it.

        Raises:
            ProgramGone: the program has ended the connection before its answer.
            BadGateway: the answer is not valid.
            MalformedRequest, RequestTimeout: the body of the request is not valid, or does not come.
        """
        try:
            await self._connection.send(self._program.send(self._sent.request) or b"")
            if self._server.they_are_waiting_for_100_continue:
                yield self._server.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
            await self._start_body()
            head = await self._head()
            self.has_begun = True
            if self.is_upgraded:
                yield head
                return
            async for piece in self._rest(head):
                yield piece
        except h11.RemoteProtocolError as error:
            raise BadGateway(f"the program's answer is not valid HTTP: {error}") from None
        except h11.LocalProtocolError as error:
            raise BadGateway(f"the program's answer does not fit the request: {error}") from None
        finally:
            await self._end_body()

    async def _start_body(self) -> None:
        if not self._sent.has_body:
            await self._connection.send(self._program.send(h11.EndOfMessage()) or b"")
            return
        self._body = asyncio.ensure_future(self._copy_body(self._client_event()))

    def _client_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises MalformedRequest."""
        try:
            return self._server.next_event()
        except h11.RemoteProtocolError as error:
            raise MalformedRequest(f"the request's body is not valid: {error}") from None

    async def _copy_body(self, event: object) -> None:
        while True:
            if event is h11.NEED_DATA:
                try:
                    async with asyncio.timeout(BODY_SILENCE_S):
                        data = await self._reader.read(READ_BYTES)
                except TimeoutError:
                    raise RequestTimeout("the request's body did not arrive in time") from None
                self._server.receive_data(data)
            elif isinstance(event, h11.Data):
                await self._connection.send(self._program.send(h11.Data(data=event.data)) or b"")
            else:
                # Trailers are of this hop.
                await self._connection.send(self._program.send(h11.EndOfMessage()) or b"")
                return
            event = self._client_event()

    async def _end_body(self) -> None:
        if self._body is not None:
            self._body.cancel()
            await asyncio.gather(self._body, return_exceptions=True)

    async def _receive(self) -> bytes:
        """Data of the program. Raises what is wrong with the body."""
        if self._body is None or (self._body.done() and self._body.exception() is None):
            return await self._connection.receive()
        receiving = asyncio.ensure_future(self._connection.receive())
        try:
            await asyncio.wait({receiving, self._body}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done() and self._body.done():
                error = self._body.exception()
                if error is not None and not isinstance(error, ProgramGone):
                    raise error
            return await receiving
        finally:
            receiving.cancel()

    async def _head(self) -> bytes:
        """The head of the answer for the client, after informational ones."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        informational = 0
        while True:
            event = self._program.next_event()
            if event is h11.NEED_DATA:
                try:
                    async with asyncio.timeout_at(deadline):
                        data = await self._receive()
                except TimeoutError:
                    raise BadGateway("the head of the program's answer did not arrive in time") from None
                if not data and not self.has_answer:
                    raise ProgramGone
                self.has_answer = True
                deadline = deadline or loop.time() + ANSWER_HEAD_S
                self._program.receive_data(data)
            elif isinstance(event, h11.Response):
                return self._server.send(self._response(event)) or b""
            elif isinstance(event, h11.InformationalResponse):
                informational += 1
                if event.status_code == 101:
                    return self._switched(event)
                if informational > _MAX_INFORMATIONAL:
                    raise BadGateway("the program sends informational answers without end")
                deadline = None
            else:
                raise ProgramGone

    def _switched(self, event: h11.InformationalResponse) -> bytes:
        received = list(event.headers)
        protocols = heads.tokens_of(received, b"upgrade")
        if self._sent.upgrade is None or protocols != [self._sent.upgrade]:
            raise BadGateway("the program switches to a protocol that was not asked for")
        self.is_upgraded = True
        fields = self._fields(received)
        fields += [(b"Connection", b"Upgrade"), (b"Upgrade", self._sent.upgrade)]
        fields = [field for field in fields if field[0] != b"content-length"]
        # h11 leaves the protocol to this proxy, which then copies bytes.
        return self._server.send(h11.InformationalResponse(status_code=101, headers=fields)) or b""

    def _response(self, event: h11.Response) -> h11.Response:
        fields = list(event.headers)
        framings = [heads.value_of(fields, each) for each in (b"transfer-encoding", b"content-length")]
        if None not in framings:
            raise BadGateway("the program's answer has both Content-Length and Transfer-Encoding")
        return h11.Response(status_code=event.status_code, reason=event.reason, headers=self._fields(fields))

    def _fields(self, fields: Fields) -> list[tuple[bytes, bytes]]:
        prefix = self._sent.prefix
        passed = []
        for name, value in heads.end_to_end(fields, _NOT_ON_SHARED_HOST if prefix else _NEVER):
            if name == b"set-cookie":
                kept = cookies.of_program(value, prefix or None)
                if kept is not None:
                    passed.append((name, kept))
            elif name == b"location" and prefix and value.startswith(b"/") and not value.startswith(b"//"):
                passed.append((name, prefix.rstrip("/").encode() + value))
            else:
                passed.append((name, value))
        if self._cookie is not None:
            passed.append((b"set-cookie", self._cookie))
        return passed

    async def _rest(self, head: bytes) -> AsyncGenerator[bytes, None]:
        """The head and the body: what the program has sent so far is one piece."""
        pieces = [head]
        while True:
            event = self._program.next_event()
            if isinstance(event, h11.Data):
                pieces.append(self._server.send(h11.Data(data=bytes(event.data))) or b"")
            elif event is h11.NEED_DATA:
                if any(pieces):
                    yield b"".join(pieces)
                    pieces = []
                self._program.receive_data(await self._receive())
            else:
                break
        pieces.append(self._server.send(h11.EndOfMessage()) or b"")
        yield b"".join(pieces)
