"""The messages of streams, from the WebSocket of a node to the task that serves the user."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.websockets import WebSocket, WebSocketDisconnect

from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.websockets import disconnect
from mooring_client.stream_messages import SUBPROTOCOL, Channel, message

# Of messages from the node; then the node, and with it the program, has to wait.
_BUFFERED_BYTES: Final = 256 * 1024
_ENDING: Final = StreamStatus.of_error("server_ending", "the control plane is shutting down; try again soon")


class NodeChannel:
    """One stream: `serve` runs in the node's request, everything else in the user's."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._messages: deque[bytes] = deque()
        self._buffered = 0
        self._changed = asyncio.Event()  # a message, or the end
        self._space = asyncio.Event()
        self._space.set()
        self._socket: WebSocket | None = None
        self._is_lost = False  # the node has ended the connection
        self._closed = asyncio.Event()
        self.revoked = asyncio.Event()  # the stream must end, even if its user reads nothing

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    async def serve(self, socket: WebSocket) -> None:
        """Receive from the node until it or the user ends the stream. A stream is served once."""
        await socket.accept(subprotocol=SUBPROTOCOL)
        self._socket = socket
        receiving = asyncio.ensure_future(self._receive(socket))
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({receiving, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            receiving.cancel()
            closing.cancel()
            self._is_lost = True
            self._changed.set()
            await disconnect(socket)

    async def _receive(self, socket: WebSocket) -> None:
        while True:
            received = await socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            data: bytes = received.get("bytes") or (received.get("text") or "").encode()
            await self._space.wait()
            self._put(data)

    def _put(self, data: bytes) -> None:
        self._messages.append(data)
        self._buffered += len(data)
        if self._buffered >= _BUFFERED_BYTES:
            self._space.clear()
        self._changed.set()

    async def receive(self) -> bytes | None:
        """Wait for the next message; None: the node has ended the connection."""
        while not self._messages:
            if self._is_lost or self._closed.is_set():
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._messages.popleft()
        self._buffered -= len(data)
        if self._buffered < _BUFFERED_BYTES:
            self._space.set()
        return data

    def is_silent(self) -> bool:
        """Whether the node has sent nothing but keepalives since the last `receive`. Drops these."""
        while self._messages and len(self._messages[0]) <= 1:
            self._buffered -= len(self._messages.popleft())
        return not (self._messages or self._is_lost or self._closed.is_set())

    async def send(self, data: bytes) -> bool:
        """Wait until the node has taken the message. Returns False if the connection is lost."""
        assert self._socket is not None, "the node sends first"
        try:
            await self._socket.send_bytes(data)
        except (RuntimeError, WebSocketDisconnect):
            return False
        return True

    def revoke(self, status: StreamStatus) -> None:
        """Drop what is buffered and end with this status."""
        self._messages.clear()
        self._buffered = 0
        self._put(message(Channel.STATUS, status.model_dump_json().encode()))
        self.revoked.set()

    def close(self) -> None:
        """Close the connection to the node, because the user is gone."""
        self._closed.set()
        self._changed.set()
        self._space.set()


class NodeChannels:
    """The open streams of this process, by id."""

    def __init__(self) -> None:
        self._open: dict[str, NodeChannel] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ids(self) -> list[str]:
        return list(self._open)

    def find(self, stream_id: str, node_id: str) -> NodeChannel | None:
        """The stream, if it is one of this node."""
        channel = self._open.get(stream_id)
        return channel if channel is not None and channel.node_id == node_id else None

    def abort(self) -> None:
        """End all streams, because the process shuts down."""
        for channel in self._open.values():
            channel.revoke(_ENDING)

    @contextmanager
    def opened(self, stream_id: str, node_id: str) -> Iterator[NodeChannel]:
        channel = self._open[stream_id] = NodeChannel(node_id)
        try:
            yield channel
        finally:
            channel.close()
            del self._open[stream_id]
