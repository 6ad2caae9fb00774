"""The links of a balancer fail as they say."""

import socket
import threading
from collections.abc import Iterator
from random import Random

import pytest

from tests.faults.balancer import Balancer, Link
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace


class _Echo:
    """A replica that answers with what it gets."""

    def __init__(self) -> None:
        self.received = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                while chunk := _received(connection):
                    self.received += chunk
                    connection.sendall(chunk)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


@pytest.fixture
def echo() -> Iterator[_Echo]:
    made = _Echo()
    yield made
    made.close()


@pytest.fixture
def balancer(workspace: Workspace, echo: _Echo) -> Iterator[Balancer]:
    ports = [workspace.take_port() for _ in range(2)]
    nobody = ("127.0.0.1", ports[1])
    made = Balancer(("127.0.0.1", ports[0]), [nobody, echo.address], Random(1))
    yield made
    made.close()
    for port in ports:
        workspace.give_back_port(port)


@pytest.fixture
def client(balancer: Balancer) -> Iterator[socket.socket]:
    """A connection by way of the replica that is up."""
    with socket.create_connection(("127.0.0.1", int(balancer.url.rsplit(":", 1)[1])), timeout=20) as made:
        made.sendall(b"hello")
        assert made.recv(5) == b"hello"
        yield made


def test_answers_are_held_back_on_a_one_way_link(
    balancer: Balancer, echo: _Echo, client: socket.socket
) -> None:
    balancer.link = Link.ONE_WAY
    client.sendall(b" again")
    wait_until(lambda: echo.received == b"hello again")
    client.settimeout(0)
    with pytest.raises(BlockingIOError):
        client.recv(6)
    client.settimeout(20)
    balancer.link = Link.OPEN
    assert client.recv(6) == b" again"


def test_requests_are_held_back_on_a_silent_link(
    balancer: Balancer, echo: _Echo, client: socket.socket
) -> None:
    balancer.link = Link.SILENT
    client.sendall(b" again")
    assert echo.received == b"hello"
    balancer.link = Link.OPEN
    assert client.recv(6) == b" again"


def test_connections_are_reset(balancer: Balancer, client: socket.socket) -> None:
    balancer.link = Link.RESET
    with pytest.raises(ConnectionResetError):
        client.recv(1)
