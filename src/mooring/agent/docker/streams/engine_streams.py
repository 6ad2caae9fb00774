"""Requests to the engine in an event loop, each on a connection of its own.

Unlike Docker's library, this closes one direction of a stream, waits for many streams without threads, and
keeps the bytes that arrive together with the headers.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode, urlsplit

import h11

from mooring.agent.docker.errors import refusal
from mooring.agent.runtime import RuntimeUnavailable

ANSWER_WITHIN_S: Final = 10.0

_READ_BYTES: Final = 64 * 1024
_MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
_DEFAULT_HOST: Final = "unix:///var/run/docker.sock"
_SWITCHING_PROTOCOLS: Final = 101
_UPGRADE: Final = (("Connection", "Upgrade"), ("Upgrade", "tcp"))

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where the engine listens.

    Attributes:
        socket: the path of a unix socket, or a host and a port.
    """

    socket: str | tuple[str, int]
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """The address in the variables of the `docker` command: DOCKER_HOST, DOCKER_TLS_VERIFY and so on."""
        host = urlsplit(environment.get("DOCKER_HOST") or _DEFAULT_HOST)
        if host.scheme in {"unix", "http+unix"}:
            return cls(host.path)
        folder = environment.get("DOCKER_CERT_PATH")
        return cls((host.hostname or "localhost", host.port or 2375), _tls(Path(folder)) if folder else None)


def _tls(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


class EngineConnection:
    """One request and its answer, which may be a stream in one or both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self._is_raw = False
        self._first = b""  # raw bytes that came with the headers

    @classmethod
    async def open(
        cls,
        address: EngineAddress,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Document | None = None,
        upgrade: bool = False,
    ) -> Self:
        """Send a request, and wait for the headers of its answer.

        Args:
            upgrade: turn the connection into a stream of bytes in both directions.

        Raises:
            EngineRefused: the engine answered with an error.
            RuntimeUnavailable: it does not answer.
        """
        target = path + (f"?{urlencode(params)}" if params else "")
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                connection = cls(*await _connect(address))
                try:
                    await connection._begin(method, target, body, upgrade=upgrade)
                except BaseException:
                    connection.abort()
                    raise
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            raise _unavailable(error) from error
        return connection

    async def read(self) -> bytes:
        """Wait for bytes of the answer; b"" at its end.

        Raises:
            RuntimeUnavailable: the connection was lost.
        """
        try:
            if not self._is_raw:
                return await self._body()
            if self._first:
                first, self._first = self._first, b""
                return first
            return await self._reader.read(_READ_BYTES)
        except (OSError, h11.ProtocolError) as error:
            raise _unavailable(error) from error

    async def write(self, data: bytes) -> None:
        """Wait until the engine has taken almost all data. Dropped if the stream or its input has ended."""
        with suppress(OSError, RuntimeError):  # RuntimeError: after `end_input`
            self._writer.write(data)
            await self._writer.drain()

    def end_input(self) -> None:
        with suppress(OSError, RuntimeError):  # the connection is lost already
            if self._writer.can_write_eof():
                self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _begin(self, method: str, target: str, body: Document | None, *, upgrade: bool) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        headers = [
            ("Host", "docker"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
        ]
        headers += _UPGRADE if upgrade else ()
        for event in (
            h11.Request(method=method, target=target, headers=headers),
            h11.Data(content),
            h11.EndOfMessage(),
        ):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()
        answer = await self._event()
        if not isinstance(answer, h11.Response | h11.InformationalResponse):
            raise h11.RemoteProtocolError("the engine closed the connection without an answer")
        if answer.status_code >= 400:
            raise refusal(answer.status_code, _message_of(await self._whole()))
        if upgrade and answer.status_code != _SWITCHING_PROTOCOLS:
            raise h11.RemoteProtocolError(f"the engine answered {answer.status_code} instead of upgrading")
        if upgrade:
            self._is_raw, self._first = True, self._http.trailing_data[0]

    async def document(self) -> Document:
        """Wait for the whole answer, a JSON object or nothing.

        Raises:
            RuntimeUnavailable: the answer is incomplete.
        """
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                content = await self._whole()
            found: Document = json.loads(content) if content else {}
        except (OSError, TimeoutError, ValueError, h11.ProtocolError) as error:
            raise _unavailable(error) from error
        return found

    async def _whole(self) -> bytes:
        content = bytearray()
        while chunk := await self._body():
            content += chunk
            if len(content) > _MAX_ANSWER_BYTES:
                raise h11.RemoteProtocolError("the answer is too long")
        return bytes(content)

    async def _body(self) -> bytes:
        event = await self._event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return b""
        raise h11.RemoteProtocolError("the engine closed the connection within an answer")

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event


class HeldConnection:
    """An upgraded connection that was opened by a thread, and is used in any event loop. Not for TLS.

    Args:
        first: bytes that came with the headers.
    """

    def __init__(self, connection: socket.socket, first: bytes) -> None:
        self._socket, self._first = connection, first
        self._socket.settimeout(0)
        self._writing = asyncio.Lock()

    @classmethod
    def open(cls, address: str | tuple[str, int], path: str, params: Mapping[str, str]) -> Self:
        """Send the request, and wait for the upgrade.

        Raises:
            EngineRefused: the engine answered with an error.
            RuntimeUnavailable: it does not answer.
        """
        connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        try:
            connection.settimeout(ANSWER_WITHIN_S)
            connection.connect(address)
            return cls(connection, _upgraded(connection, f"{path}?{urlencode(params)}"))
        except (OSError, h11.ProtocolError) as error:
            connection.close()
            raise _unavailable(error) from error
        except BaseException:
            connection.close()
            raise

    async def read(self) -> bytes:
        """As `EngineConnection.read`."""
        if self._first:
            first, self._first = self._first, b""
            return first
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, _READ_BYTES)
        except ConnectionResetError:
            return b""  # as in `_Reader`
        except OSError as error:
            raise _unavailable(error) from error

    async def write(self, data: bytes) -> None:
        """As `EngineConnection.write`."""
        with suppress(OSError):
            async with self._writing:
                await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def end_input(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        """Whether the engine has closed its side. Only for connections without output."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def abort(self) -> None:
        self._socket.close()


class EngineApi:
    """The calls of streams to one engine.

    Args:
        known_version: the version of the API to use, if it is known.
        negotiated_version: asks the engine for it. May block, and raise RuntimeUnavailable.
    """

    def __init__(
        self,
        address: EngineAddress,
        known_version: Callable[[], str | None],
        negotiated_version: Callable[[], str],
    ) -> None:
        self._address = address
        self._known_version, self._negotiated_version = known_version, negotiated_version

    async def open(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Document | None = None,
        upgrade: bool = False,
    ) -> EngineConnection:
        """As `EngineConnection.open`."""
        version = self._known_version() or await asyncio.to_thread(self._negotiated_version)
        return await EngineConnection.open(
            self._address, method, f"/v{version}{path}", params=params, body=body, upgrade=upgrade
        )

    def hold(self, path: str, params: Mapping[str, str]) -> HeldConnection | None:
        """As `HeldConnection.open`, in any thread. None: not possible with TLS."""
        if self._address.tls is not None:
            return None
        version = self._known_version() or self._negotiated_version()
        return HeldConnection.open(self._address.socket, f"/v{version}{path}", params)

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Document | None = None,
    ) -> Document:
        """Send a request and return its whole answer.

        Raises:
            EngineRefused, RuntimeUnavailable: as `EngineConnection.open`.
        """
        connection = await self.open(method, path, params=params, body=body)
        try:
            return await connection.document()
        finally:
            connection.abort()


def _upgraded(connection: socket.socket, target: str) -> bytes:
    """Request the upgrade of a connection. Return the bytes that came with the headers of the answer.

    Raises:
        EngineRefused: the engine answered with an error.
    """
    http = h11.Connection(h11.CLIENT)
    headers = [("Host", "docker"), ("Content-Length", "0"), *_UPGRADE]
    request = h11.Request(method="POST", target=target, headers=headers)
    connection.sendall((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
    while (answer := http.next_event()) is h11.NEED_DATA:
        http.receive_data(connection.recv(_READ_BYTES))
    if not isinstance(answer, h11.InformationalResponse):
        status = answer.status_code if isinstance(answer, h11.Response) else 500
        raise refusal(status, "the engine does not upgrade the connection")
    return http.trailing_data[0]


class _Reader(asyncio.StreamReader):
    """Takes a reset for the end of the data.

    The engine closes the connection of a process that has ended without reading all its input, and the
    kernel reports the unread input as a reset. The base class would drop the output that has not been read
    yet. Callers find out whether a process has ended, and answers of HTTP have a length.
    """

    def set_exception(self, exc: Exception) -> None:
        if isinstance(exc, ConnectionResetError):
            self.feed_eof()
        else:
            super().set_exception(exc)


async def _connect(address: EngineAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = _Reader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport: asyncio.Transport
    if isinstance(address.socket, str):
        transport, _ = await loop.create_unix_connection(lambda: protocol, address.socket)
    else:
        host, port = address.socket
        transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=address.tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _message_of(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, TypeError, KeyError):
        return content[:200].decode(errors="replace")


def _unavailable(error: Exception) -> RuntimeUnavailable:
    return RuntimeUnavailable(f"the container engine does not answer ({type(error).__name__}: {error})")
