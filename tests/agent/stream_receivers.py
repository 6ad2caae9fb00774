"""The process that waits for streams of nodes: a WebSocket server that records what nodes send."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from mooring.schemas.agent_streams import StreamStatus
from mooring_client.stream_messages import SUBPROTOCOL, Channel, split
from tests.testbed.waiting import wait_until

_PREFIX = "/agent/v1/streams/"


class ReceivedStream:
    """One stream of a node."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.authorization = connection.request.headers.get("Authorization") if connection.request else None
        self.messages: list[tuple[Channel, bytes]] = []
        self.has_ended = False

    def output(self, channel: Channel = Channel.STDOUT) -> bytes:
        return b"".join(data for on, data in list(self.messages) if on is channel)

    def disconnect(self) -> None:
        """End the connection without a close frame, even if this side is about to send."""
        with suppress(OSError):
            self.connection.socket.shutdown(socket.SHUT_RDWR)

    def lines(self) -> list[str]:
        """The log lines, without their times."""
        found = [data for on, data in list(self.messages) if on is not Channel.STATUS and data]
        return [line.partition(b" ")[2].decode() for line in found]

    @property
    def keepalives(self) -> int:
        return self.messages.count((Channel.STDOUT, b""))

    @property
    def status(self) -> StreamStatus | None:
        found = [data for on, data in list(self.messages) if on is Channel.STATUS]
        return StreamStatus.model_validate_json(found[0]) if found else None

    def ended(self, timeout_s: float = 20) -> StreamStatus:
        """Wait for the status."""
        return wait_until(lambda: self.status, timeout_s)


class StreamReceiver:
    """Records the streams that nodes open, by id.

    Attributes:
        reading: while it is cleared, the receiver reads nothing.
    """

    def __init__(self) -> None:
        self.url = ""
        self.received: dict[str, ReceivedStream] = {}
        self.reading = threading.Event()
        self.reading.set()

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self.received

    def stream(self, stream_id: str) -> ReceivedStream:
        """Wait for a stream."""
        return wait_until(lambda: self.received.get(stream_id), 20)

    def handle(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        stream = ReceivedStream(connection)
        self.received[connection.request.path.removeprefix(_PREFIX)] = stream
        with suppress(ConnectionClosed):
            while True:
                self.reading.wait()
                stream.messages.append(split(connection.recv(decode=False)))
        stream.has_ended = True


@contextmanager
def stream_receiver() -> Iterator[StreamReceiver]:
    receiver = StreamReceiver()
    subprotocols = [Subprotocol(SUBPROTOCOL)]
    with serve(
        receiver.handle,
        "127.0.0.1",
        0,
        subprotocols=subprotocols,
        compression=None,
        ping_interval=None,
        max_queue=4,
        max_size=2 * 1024 * 1024,
    ) as server:
        receiver.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.reading.set()
            server.shutdown()
            for stream in list(receiver.received.values()):
                stream.disconnect()
            thread.join()
