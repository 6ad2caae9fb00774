"""The port proxy: programs that end or reset connections, and what clients are told about it."""

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.gateway.port_proxy import (
    WITHIN_S,
    Program,
    Proxy,
    get,
    read_all,
    read_head,
)
from tests.gateway.test_port_proxy import OK, UPGRADE
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Resetting:
    """A program that sends `sent` after a head, and resets the connection when told to."""

    def __init__(self, proxy: Proxy, sent: bytes) -> None:
        self._sent = sent
        self.now = threading.Event()
        self.program = proxy.program(self._serve)

    def _serve(self, connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(self._sent)
        self.now.wait(WITHIN_S)
        reset(connection)


def test_a_reset_is_not_taken_for_the_end_of_an_answer(proxy: Proxy) -> None:
    made = Resetting(proxy, b"HTTP/1.1 200 OK\r\n\r\npart")
    with proxy.raw(get(proxy.host(made.program.port))) as connection:
        assert b"chunked" in read_head(connection)
        assert connection.recv(100).startswith(b"4\r\npart")
        made.now.set()
        assert not read_all(connection).endswith(b"0\r\n\r\n")


def test_a_reset_resets_a_client_that_knows_no_chunks(proxy: Proxy) -> None:
    made = Resetting(proxy, b"HTTP/1.1 200 OK\r\n\r\npart")
    request = get(proxy.host(made.program.port)).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with proxy.raw(request) as connection:
        read_head(connection)
        assert connection.recv(100) == b"part"
        made.now.set()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)


@contextmanager
def upgraded(proxy: Proxy) -> Iterator[tuple[Resetting, socket.socket]]:
    """A program that has switched protocols, and its client, which has read a part of what follows."""
    head = b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    made = Resetting(proxy, head + b"part")
    with proxy.raw(get(proxy.host(made.program.port), "/", *UPGRADE)) as connection:
        assert read_head(connection).startswith(b"HTTP/1.1 101 ")
        assert connection.recv(100) == b"part"
        yield made, connection


def test_a_reset_after_an_upgrade_resets_the_client(proxy: Proxy) -> None:
    with upgraded(proxy) as (made, connection):
        made.now.set()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)


def test_a_reset_after_an_upgrade_resets_a_client_that_writes(proxy: Proxy) -> None:
    for _ in range(20):
        with upgraded(proxy) as (made, connection):
            made.now.set()
            with pytest.raises(ConnectionResetError):
                while not select.select([connection], [], [], 0.001)[0]:
                    connection.send(b"x")
                connection.recv(100)


def test_an_early_answer_arrives_though_the_program_resets_the_connection(proxy: Proxy) -> None:
    """Servers do so that refuse a body by its size: they close without having read it."""
    answer = b"HTTP/1.1 413 Too large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlarge"

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        # Something unread makes the kernel reset the connection.
        select.select([connection], [], [], WITHIN_S)
        connection.sendall(answer)
        connection.close()

    program = proxy.program(serve)
    for _ in range(10):
        with proxy.raw(get(proxy.host(program.port), "/", f"Content-Length: {MIB}")) as connection:
            connection.sendall(bytes(MIB))
            assert read_head(connection).startswith(b"HTTP/1.1 413 ")
            assert connection.recv(100) == b"large"


def posted(proxy: Proxy, program: Program) -> bytes:
    return get(proxy.host(program.port), "/", "Content-Length: 2").replace(b"GET", b"POST", 1) + b"{}"


def answer_of(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    return read_head(connection) + connection.recv(100)


def counting_bodies(connection: socket.socket) -> None:
    while head := read_head(connection):
        if head.startswith(b"POST"):
            connection.recv(100)
        connection.sendall(OK)


def test_only_requests_that_may_be_repeated_use_a_connection_that_was_idle_for_long(proxy: Proxy) -> None:
    """The program may close it just then, and nobody could know whether it has acted on the request."""
    program = proxy.program(counting_bodies)
    with proxy.raw() as connection:
        for _ in range(3):
            assert answer_of(connection, posted(proxy, program)).endswith(b"ok")
        assert len(program.connections) == 1
        idle_since = time.monotonic()
        wait_until(lambda: time.monotonic() - idle_since > 1.2)
        assert answer_of(connection, get(proxy.host(program.port))).endswith(b"ok")
        assert len(program.connections) == 1
        idle_since = time.monotonic()
        wait_until(lambda: time.monotonic() - idle_since > 1.2)
        assert answer_of(connection, posted(proxy, program)).endswith(b"ok")
        assert len(program.connections) == 2


def test_a_request_that_may_have_had_an_effect_is_not_sent_twice(proxy: Proxy) -> None:
    heads: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        """Answer once; close the connection at the next request."""
        heads.append(read_head(connection))
        connection.recv(100)
        connection.sendall(OK)
        heads.append(read_head(connection))

    program = proxy.program(serve)
    with proxy.raw() as connection:
        assert answer_of(connection, posted(proxy, program)).endswith(b"ok")
        assert answer_of(connection, posted(proxy, program)).startswith(b"HTTP/1.1 502 ")
    assert len(heads) == 2
    assert len(program.connections) == 1
