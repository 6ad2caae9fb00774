"""A user's WebSocket to an instance, and the node's side of it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlencode

import pytest
from websockets.sync.client import ClientConnection

from mooring.schemas.agent_streams import StreamRequest
from mooring_client.stream_messages import KEEPALIVE, SUBPROTOCOL
from tests.api.conftest import Sandbox
from tests.nodes import websocket
from tests.testbed.waiting import wait_until

EXEC = [("command", "sh"), ("tty", "true"), ("stdin", "true")]


class Streams:
    """Opens streams to one running instance. All are closed at the end of the test."""

    def __init__(self, sandbox: Sandbox, exits: ExitStack) -> None:
        self.sandbox, self._exits = sandbox, exits
        self.instance_id = sandbox.running().instance_id
        self._taken: set[str] = set()

    def url(self, path: str, query: list[tuple[str, str]]) -> str:
        base = str(self.sandbox.client.base_url).replace("http", "ws", 1).rstrip("/")
        return f"{base}/v1/instances/{self.instance_id}/{path}?{urlencode(query)}"

    def connect(
        self,
        path: str = "exec/stream",
        query: list[tuple[str, str]] = EXEC,
        *,
        key: str | None = None,
        subprotocols: tuple[str, ...] = (SUBPROTOCOL,),
    ) -> ClientConnection:
        """Connect as a user. Raises InvalidStatus: the replica rejects it."""
        authorization = f"Bearer {key}" if key else self.sandbox.client.headers["Authorization"]
        return self._exits.enter_context(websocket(self.url(path, query), authorization, *subprotocols))

    def next_request(self) -> StreamRequest:
        """Wait until the node is asked for another stream."""

        def found() -> StreamRequest | None:
            for each in self.sandbox.node.stream_requests():
                if each.id not in self._taken:
                    self._taken.add(each.id)
                    return each
            return None

        return wait_until(found)

    def open(
        self,
        path: str = "exec/stream",
        query: list[tuple[str, str]] = EXEC,
        *,
        key: str | None = None,
        first: bytes = KEEPALIVE,
        subprotocols: tuple[str, ...] = (SUBPROTOCOL,),
    ) -> tuple[ClientConnection, ClientConnection]:
        """Connect as a user and as the node, which begins with this message. Returns both connections."""
        served: list[ClientConnection] = []

        def serve() -> None:
            node = self._exits.enter_context(self.sandbox.node.connect(self.next_request().id))
            node.send(first)
            served.append(node)

        thread = threading.Thread(target=serve)
        thread.start()
        user = self.connect(path, query, key=key, subprotocols=subprotocols)
        thread.join(20)
        return user, served[0]


@pytest.fixture
def streams(sandbox: Sandbox) -> Iterator[Streams]:
    with ExitStack() as exits:
        yield Streams(sandbox, exits)


Opened = Callable[..., tuple[ClientConnection, ClientConnection]]
