"""HTTP/1.1 for Docker clients, with deadlines and limits. A connection may become a stream."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import h11

from mooring_client.errors import BadRequest, MooringError

API_VERSION: Final = "1.43"
MIN_API_VERSION: Final = "1.24"
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
HEAD_WITHIN_S: Final = 20.0
IDLE_S: Final = 120.0
BODY_WITHIN_S: Final = 60.0
WRITTEN_WITHIN_S: Final = 60.0
RAW_STREAM: Final = "application/vnd.docker.raw-stream"
MULTIPLEXED: Final = "application/vnd.docker.multiplexed-stream"

_MAX_HEAD_BYTES: Final = 32 * 1024
_READ_BYTES: Final = 64 * 1024
_VERSION: Final = re.compile(r"/v(\d{1,2})\.(\d{1,3})(?=/)")
_MAX_PARAMETERS: Final = 64
_SKIPPED_WITHIN_S: Final = 5.0
_LINGER_S: Final = 1.0
_HEADERS: Final = (
    ("Server", "Mooring"), ("Api-Version", API_VERSION), ("Ostype", "linux"), ("Cache-Control", "no-cache"),
)  # fmt: skip


class ClientGone(Exception):
    """The client has ended the connection, or does not read."""


@dataclass(frozen=True, slots=True)
class DockerRequest:
    """The head of a request. `path` has no version; of a repeated parameter, the last one counts."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def wants_upgrade(self) -> bool:
        return "upgrade" in self.headers.get("connection", "").lower()

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A parameter that clients send as `1`, `true` and the like."""
        text = self.params.get(name)
        return default if text is None else text.lower() not in {"", "0", "no", "false", "none"}

    def number(self, name: str, default: int, most: int) -> int:
        """Raises BadRequest: it is no number from 0 to `most`."""
        text = self.params.get(name) or str(default)
        if not re.fullmatch(r"-?\d{1,9}", text) or not -1 <= int(text) <= most:
            raise BadRequest(f"mooring: {name} must be a number from 0 to {most}")
        return int(text)

    @classmethod
    def parsed(cls, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> "DockerRequest":
        """Raises BadRequest: the target or a header is not valid."""
        path, _, query = target.decode("ascii").partition("?")
        if not path.startswith("/"):
            raise BadRequest("the target of a request must be a path")
        if (version := _VERSION.match(path)) is not None:
            if int(version[1]) != 1 or int(version[2]) < int(MIN_API_VERSION[2:]):
                raise BadRequest(
                    f"client version {version[0][2:]} is too old: use {MIN_API_VERSION} or newer"
                )
            path = path[version.end() :]
        try:
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS, errors="strict")
            decoded = unquote(path, errors="strict")
        except (ValueError, UnicodeDecodeError):
            raise BadRequest("the target of the request is not valid") from None
        if "\0" in decoded or any("\0" in text for pair in pairs for text in pair):
            raise BadRequest("the target of the request has a NUL character")
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        return cls(method.decode("ascii"), decoded, dict(pairs), named)


class DockerConnection:
    """One connection of a client. Requests are read one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._is_head = False
        self._has_begun = False
        self.is_raw = False
        self._first = b""  # raw bytes that came with the request
        self._read_bytes = 0

    # Requests.

    async def next_request(self) -> DockerRequest | None:
        """Wait for the next request; None: there is none.

        Raises:
            BadRequest: it is not valid; the connection must be closed after the answer.
            ClientGone: it did not come in time.
        """
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        self._has_begun = False
        self._read_bytes = 0
        try:
            event = await self._event(IDLE_S, HEAD_WITHIN_S)
        except h11.RemoteProtocolError as error:
            raise BadRequest(f"this is no HTTP request: {error}") from None
        if not isinstance(event, h11.Request):
            return None
        self._is_head = event.method == b"HEAD"
        return DockerRequest.parsed(event.method, event.target, list(event.headers))

    @property
    def can_go_on(self) -> bool:
        """Whether another request may follow."""
        return not self.is_raw and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    @property
    def is_idle(self) -> bool:
        """Whether the request was read to its end, so that another can follow after the answer."""
        return self._http.their_state is h11.DONE

    async def skip_body(self) -> None:
        """Read what is left of the request, if it is not much: clients may read no answer before."""
        if self.is_raw or self._http.their_state is not h11.SEND_BODY:
            return
        with suppress(BadRequest, TimeoutError):
            async with asyncio.timeout(_SKIPPED_WITHIN_S):
                await self.body()

    async def linger(self) -> None:
        """Let the client read the last answer, although it may still send."""
        self.end_output()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await self.reader.read(_READ_BYTES):
                    pass

    @property
    def has_answered(self) -> bool:
        return self._has_begun or self.is_raw

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body of the request. Raises ClientGone, BadRequest."""
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        while True:
            try:
                event = await self._event(BODY_WITHIN_S, BODY_WITHIN_S)
            except h11.RemoteProtocolError as error:
                raise BadRequest(f"the body is not valid: {error}") from None
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ClientGone

    async def body(self) -> bytes:
        """Raises BadRequest: it is too large."""
        content = bytearray()
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in self.chunks():
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
        return bytes(content)

    async def document(self) -> dict[str, Any]:
        """The body as a JSON object; empty: {}. Raises BadRequest."""
        content = await self.body()
        if not content.strip():
            return {}
        try:
            found = json.loads(content, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise BadRequest("the body is not valid JSON") from None
        if not isinstance(found, dict):
            raise BadRequest("the body must be a JSON object")
        _require_valid_text(found)
        return found

    # Answers.

    async def answer(
        self, status: int, document: Any = None, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Send a whole answer; a document as JSON, None: without a body."""
        content = b"" if document is None else json.dumps(document).encode() + b"\n"
        await self.answer_bytes(status, content, "application/json", headers)

    async def answer_bytes(
        self, status: int, content: bytes, content_type: str, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        described = [*_HEADERS, *headers]
        if status not in {204, 304}:
            described += [("Content-Type", content_type), ("Content-Length", str(len(content)))]
        events = [_head(status, described)]
        events += [h11.Data(content)] if content and not self._is_head else []
        self._has_begun = True
        await self._send(*events, h11.EndOfMessage())

    async def begin(self, content_type: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Begin an answer whose length is not known. The headers are sent at once."""
        self._has_begun = True
        await self._send(_head(200, [*_HEADERS, *headers, ("Content-Type", content_type)]))

    async def write(self, data: bytes) -> None:
        """Send a part of the answer, and wait until the client takes it."""
        if data and not self._is_head:
            await self._send(h11.Data(data))

    async def write_document(self, document: Any) -> None:
        await self.write(json.dumps(document).encode() + b"\n")

    async def end(self) -> None:
        await self._send(h11.EndOfMessage())

    async def gone(self) -> None:
        """Wait until the client ends the connection, during an answer."""
        with suppress(OSError, h11.RemoteProtocolError):
            while data := await self.reader.read(_READ_BYTES):
                self._http.receive_data(data)  # of a request that it sends ahead
                if len(self._http.trailing_data[0]) > _MAX_HEAD_BYTES:
                    return

    async def upgrade(self, content_type: str, *, is_asked: bool) -> None:
        """Turn the connection into a stream of bytes in both directions. The body of the request is read."""
        self.is_raw = True
        self._first = self._http.trailing_data[0]
        head = "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        if not is_asked:
            head = "HTTP/1.1 200 OK\r\n"
        await self.write_raw(f"{head}Content-Type: {content_type}\r\n\r\n".encode(), WRITTEN_WITHIN_S)

    async def read_raw(self) -> bytes:
        """Bytes of the stream; b"": the client has closed its side."""
        first, self._first = self._first, b""
        if first:
            return first
        try:
            return await self.reader.read(_READ_BYTES)
        except OSError:
            return b""

    async def write_raw(self, data: bytes, within_s: float | None = None) -> None:
        """Wait until the client takes the bytes, or forever: a program waits for its reader."""
        try:
            async with asyncio.timeout(within_s):
                self.writer.write(data)
                await self.writer.drain()
        except (OSError, TimeoutError, RuntimeError) as error:
            raise ClientGone from error

    def end_output(self) -> None:
        with suppress(OSError, RuntimeError):
            if self.writer.can_write_eof():
                self.writer.write_eof()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def _send(self, *events: h11.Event) -> None:
        try:
            data = b"".join(self._http.send(event) or b"" for event in events)
        except h11.LocalProtocolError as error:
            raise ClientGone from error
        if data:
            await self.write_raw(data, WRITTEN_WITHIN_S)

    async def _event(self, first_within_s: float, within_s: float) -> Any:
        """The next event. Raises ClientGone: it did not come in time; RemoteProtocolError."""
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while (event := self._http.next_event()) is h11.NEED_DATA:
            has_part = bool(self._http.trailing_data[0])
            if has_part and deadline is None:
                deadline = loop.time() + within_s
            until = deadline if deadline is not None else loop.time() + first_within_s
            try:
                async with asyncio.timeout_at(until):
                    data = await self.reader.read(_READ_BYTES)
            except (TimeoutError, OSError) as error:
                raise ClientGone from error
            self._http.receive_data(data)
        return event


def _head(status: int, headers: Sequence[tuple[str, str]]) -> h11.Event:
    reason = HTTPStatus(status).phrase.encode()
    return h11.Response(status_code=status, reason=reason, headers=list(headers))


def error_document(error: MooringError) -> dict[str, str]:
    return {"message": error.message}


def status_of(error: MooringError) -> int:
    """Docker's clients know few statuses: invalid requests are 400."""
    return {422: 400, 426: 400, 410: 400}.get(error.status, error.status)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _require_valid_text(found: Any) -> None:
    """Raises BadRequest: a text has a lone surrogate, which no database stores."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise BadRequest("the body has invalid text") from None
