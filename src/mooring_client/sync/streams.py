# Generated from aio/streams.py: change that file, and run `make client`.
"""Streams over WebSockets: commands with input and output, and connections to ports."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import httpx
from pydantic_core import to_json
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection

from mooring_client import answers
from mooring_client.calls import Call, path
from mooring_client.failures import BadAnswer, ConnectionFailed, StreamInterrupted
from mooring_client.stream_messages import (
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    STDIN_CLOSED,
    TCP_SUBPROTOCOL,
    BadMessage,
    Channel,
    message,
    split,
)
from mooring_client.sync.connecting import Connecting
from mooring_client.sync.transport import CONNECT_TIMEOUT_S, Transport

# Below the 60 s after which many proxies close a silent connection.
_PING_INTERVAL_S: Final = 20
# A program's output may still be on its way when its reader leaves: the server does not answer until then.
_CLOSE_TIMEOUT_S: Final = 1
_OUTPUT: Final = frozenset({Channel.STDOUT, Channel.STDERR})


@contextmanager
def opened(transport: Transport, call: Call[Any], subprotocol: str) -> Iterator[ClientConnection]:
    """Open the WebSocket of an operation.

    Raises:
        MooringError: the server's answer, if it rejects the request.
        ConnectionFailed: the server cannot be reached.
        BadAnswer: it redirects, or is not Mooring.
    """
    query = httpx.QueryParams(call.query)
    url = f"{transport.endpoint.websocket_url}{call.path}{f'?{query}' if query else ''}"
    try:
        opening = Connecting(
            url,
            subprotocols=[subprotocol],  # type: ignore[list-item]  # a NewType of str
            additional_headers=transport.headers(),
            user_agent_header=None,
            compression=None,
            open_timeout=CONNECT_TIMEOUT_S + transport.timeout_s,
            ping_interval=_PING_INTERVAL_S,
            max_size=MAX_MESSAGE_BYTES,
            proxy=None if transport.endpoint.is_loopback else True,
            close_timeout=_CLOSE_TIMEOUT_S,
        )
        websocket = opening.__enter__()
    except InvalidStatus as rejection:
        response = rejection.response
        if 300 <= response.status_code < 400:
            raise answers.redirect(response.headers.get("Location")) from None
        raise answers.error(
            response.status_code, bytes(response.body or b""), response.headers.get("Retry-After")
        ) from None
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        raise ConnectionFailed(f"{transport.endpoint.url} cannot be reached: {error}") from None
    with websocket:
        yield websocket


@contextmanager
def connected(transport: Transport, instance_id: str, port: int) -> "Iterator[PortConnection]":
    """Open a TCP connection to a port of a container."""
    call = Call(
        operation="stream_instance_port",
        method="GET",
        path=path("/v1/instances/{}/ports/{}/stream", instance_id, port),
        read=answers.nothing,
    )
    with opened(transport, call, TCP_SUBPROTOCOL) as websocket:
        yield PortConnection(websocket)


class Command:
    """A running command: iterate over its output, and write its input.

    Attributes:
        exit_code: the command's, once the output has ended.
    """

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket
        self.exit_code: int | None = None

    def __iter__(self) -> Iterator[tuple[Channel, bytes]]:
        """Yield the output: `Channel.STDOUT` or `Channel.STDERR`, and the data.

        Raises:
            StreamInterrupted: the stream ended before the command.
        """
        try:
            for received in self._websocket:
                try:
                    channel, data = split(received if isinstance(received, bytes) else received.encode())
                except BadMessage:
                    continue  # of a newer server
                if channel is Channel.STATUS:
                    self._end(answers.json(data))
                    return
                if channel in _OUTPUT and data:
                    yield channel, data
        except (ConnectionClosed, BadAnswer) as error:
            raise StreamInterrupted(f"the connection ended before the command: {error}") from None
        raise StreamInterrupted("the connection ended before the command")

    def _end(self, status: Any) -> None:
        if not isinstance(status, dict):
            raise BadAnswer("its status is no JSON object")
        if isinstance(reason := status.get("reason"), dict):
            raise StreamInterrupted(str(reason.get("message", "")), str(reason.get("code", "")))
        self.exit_code = status.get("exit_code")

    def write(self, data: bytes) -> None:
        """Send input. It waits while the command does not read. Input after the command's end is dropped."""
        for start in range(0, len(data), MAX_DATA_BYTES):
            self._send(message(Channel.STDIN, data[start : start + MAX_DATA_BYTES]))

    def close_stdin(self) -> None:
        """End the input."""
        self._send(STDIN_CLOSED)

    def resize(self, width: int, height: int) -> None:
        """Tell the command the size of the terminal, in characters."""
        self._send(message(Channel.RESIZE, to_json({"Width": width, "Height": height})))

    def signal(self, name: str) -> None:
        """Send a signal, such as `INT`."""
        self._send(message(Channel.SIGNAL, to_json({"Signal": name})))

    def _send(self, data: bytes) -> None:
        with suppress(ConnectionClosed):  # the reader of the output learns why
            self._websocket.send(data)


class PortConnection:
    """A TCP connection to a port of a container."""

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket

    def read(self) -> bytes:
        """The next data; empty: the program has ended its direction.

        Raises:
            StreamInterrupted: the connection was lost.
        """
        try:
            received = self._websocket.recv()
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == 1000:
                return b""
            reason = error.rcvd.reason if error.rcvd else ""
            raise StreamInterrupted(f"the connection to the port was lost: {reason or error}") from None
        return received if isinstance(received, bytes) else received.encode()

    def write(self, data: bytes) -> None:
        """Send data.

        Raises:
            StreamInterrupted: the connection has ended.
        """
        for start in range(0, len(data), MAX_DATA_BYTES):
            self._send(data[start : start + MAX_DATA_BYTES])

    def close_write(self) -> None:
        """End this direction; the program may still send."""
        self._send(b"")

    def _send(self, data: bytes) -> None:
        try:
            self._websocket.send(data)
        except ConnectionClosed as error:
            raise StreamInterrupted(f"the connection to the port has ended: {error}") from None
