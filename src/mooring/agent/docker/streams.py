"""Streamed answers of the engine: read by a thread of their own, and taken apart into frames.

A blocking read cannot be given up, and the engine's streams fall silent for ever when it freezes. So a
thread reads, and its reader may wait for as long as it likes and close from any thread.
"""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal, cast

from requests import Response

from mooring.agent.docker.errors import engine_call
from mooring.agent.docker.transport import connection_told_to
from mooring.agent.runtime import RuntimeUnavailable

StreamName = Literal["stdout", "stderr"]

_READ_BYTES = 65_536
_HEADER_BYTES = 8  # stream number, three zeros, length as four bytes
_WAITING_CHUNKS = 64  # then the engine, and with it the container, is slowed down


class ByteStream:
    """The body of one streamed answer. The caller must close it; any thread may."""

    def __init__(self, request: Callable[[], Response]) -> None:
        self._request = request
        self._response: Response | None = None
        self._connection: Any = None  # while the engine's headers are waited for
        self._chunks: queue.Queue[bytes | Exception] = queue.Queue(_WAITING_CHUNKS)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._pump, name="docker-stream", daemon=True)
        self._thread.start()

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next bytes; none at all at the end, None when nothing came for that long.

        Raises:
            EngineRefused: the request was refused.
            RuntimeUnavailable: the engine went away in the middle.
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
        """Cut the stream off; a reader in another thread sees its end."""
        with self._lock:
            self._closed = True
            response, self._response = self._response, None
            self._cut_off()
        if response is not None:
            # Released already (the end was read), or gone: then there is nothing to wake.
            with suppress(RuntimeError, ValueError, OSError):
                cast(Any, response.raw).shutdown()
            self._thread.join()
            response.close()
        self._end_a_waiting_read()

    def _cut_off(self) -> None:
        """End a request that has no answer yet; the engine then gives up what it was to do."""
        if self._connection is not None and self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _connected(self, connection: Any) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeUnavailable("the stream was closed before its request was sent")
            self._connection = connection

    def _asked(self) -> Response:
        try:
            with connection_told_to(self._connected):
                return self._request()
        finally:
            with self._lock:
                self._connection = None

    def _end_a_waiting_read(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._chunks.get_nowait()
        with suppress(queue.Full):
            self._chunks.put_nowait(b"")

    def _pump(self) -> None:
        try:
            response = self._asked()
            if not self._keep(response):
                response.close()
                return
            raw: Any = response.raw
            # read1, not read: it gives what is there, and takes what was read ahead with the headers,
            # which reading the bare socket as Docker's library does for exec would lose.
            while chunk := raw.read1(_READ_BYTES):
                self._hand_over(chunk)
            self._hand_over(b"")
        except Exception as error:  # it belongs to the reader: see `read`
            self._hand_over(error)

    def _keep(self, response: Response) -> bool:
        with self._lock:
            if not self._closed:
                self._response = response
            return not self._closed

    def _hand_over(self, chunk: bytes | Exception) -> None:
        while not self._closed:
            with suppress(queue.Full):
                self._chunks.put(chunk, timeout=0.2)
                return


class Demultiplexer:
    """Takes the engine's stream without a terminal apart: bytes in, whole (stream, payload) frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[StreamName, bytes]]:
        self._buffer += chunk
        while len(self._buffer) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(self._buffer[4:_HEADER_BYTES], "big")
            if len(self._buffer) < end:
                return
            name: StreamName = "stderr" if self._buffer[0] == 2 else "stdout"
            payload = bytes(self._buffer[_HEADER_BYTES:end])
            del self._buffer[:end]
            yield name, payload
