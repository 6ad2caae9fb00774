"""Reads streamed answers of the engine in a thread, and splits them into frames.

A blocking read cannot be cancelled, and would last forever if the engine froze. Because a separate thread
does the blocking reads, a stream can be read with any timeout, and closed from any thread.
"""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

from requests import Response

from mooring.agent.docker.errors import engine_call
from mooring.agent.docker.transport import listening_to_connections
from mooring.agent.runtime import RuntimeUnavailable
from mooring_client.stream_messages import Channel

_READ_BYTES = 65_536
_HEADER_BYTES = 8  # stream number, three zeros, length as four bytes
_MAX_UNREAD_CHUNKS = 64  # then the engine, and with it the container's output, has to wait


class ByteStream:
    """The body of one streamed answer. The caller must close it; any thread may."""

    def __init__(self, request: Callable[[], Response]) -> None:
        self._request = request
        self._response: Response | None = None
        self._connection: Any = None  # while waiting for the engine's headers
        self._chunks: queue.Queue[bytes | Exception] = queue.Queue(_MAX_UNREAD_CHUNKS)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._pump, name="docker-stream", daemon=True)
        self._thread.start()

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next bytes; b"" at the end, None after the timeout.

        Raises:
            EngineRefused: the engine answered the request with an error.
            RuntimeUnavailable: the connection was lost.
        """
        try:
            chunk = self._chunks.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(chunk, Exception):
            with engine_call("stream"):
                raise chunk
        return chunk

    def close(self) -> None:
        """End the stream, also for a reader in another thread."""
        with self._lock:
            self._closed = True
            response, self._response = self._response, None
            self._end_request()
        if response is not None:
            # Fails if the connection was released (at the end) or lost: then there is no read to end.
            with suppress(RuntimeError, ValueError, OSError):
                cast(Any, response.raw).shutdown()
            self._thread.join()
            response.close()
        self._wake_reader()

    def _end_request(self) -> None:
        """End a request that has no answer yet; the engine then cancels the work for it."""
        if self._connection is not None and self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _connected(self, connection: Any) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeUnavailable("the stream was closed before its request was sent")
            self._connection = connection

    def _send(self) -> Response:
        try:
            with listening_to_connections(self._connected):
                return self._request()
        finally:
            with self._lock:
                self._connection = None

    def _wake_reader(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._chunks.get_nowait()
        with suppress(queue.Full):
            self._chunks.put_nowait(b"")

    def _pump(self) -> None:
        try:
            response = self._send()
            if not self._accept(response):
                response.close()
                return
            raw: Any = response.raw
            # `read1` returns what has arrived, including bytes that were read with the headers. Reading from
            # the socket, as Docker's library does for exec, would lose those bytes.
            while chunk := raw.read1(_READ_BYTES):
                self._put(chunk)
            self._put(b"")
        except Exception as error:  # `read` raises it
            self._put(error)

    def _accept(self, response: Response) -> bool:
        """Return False if the stream was closed before its response came."""
        with self._lock:
            if not self._closed:
                self._response = response
            return not self._closed

    def _put(self, chunk: bytes | Exception) -> None:
        while not self._closed:
            with suppress(queue.Full):
                self._chunks.put(chunk, timeout=0.2)
                return


class Demultiplexer:
    """Splits the engine's stream of a container without a terminal into whole frames: (channel, payload)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[Channel, bytes]]:
        self._buffer += chunk
        while len(self._buffer) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(self._buffer[4:_HEADER_BYTES], "big")
            if len(self._buffer) < end:
                return
            channel = Channel.STDERR if self._buffer[0] == Channel.STDERR else Channel.STDOUT
            payload = bytes(self._buffer[_HEADER_BYTES:end])
            del self._buffer[:end]
            yield channel, payload
