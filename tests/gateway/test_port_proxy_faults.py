"""The port proxy: programs, clients and processes that misbehave or end. Others are not affected."""

import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from mooring.gateway.ports.shared import REQUESTS_PER_NETWORK
from tests.gateway.port_proxy import (
    WITHIN_S,
    Program,
    Proxy,
    get,
    read_all,
    read_head,
)
from tests.gateway.test_port_proxy import OK, UPGRADE, echo_request
from tests.service import ADMIN_KEY
from tests.testbed.waiting import wait_until
from tests.walk.test_stream_faults import connections_of

MIB = 1024 * 1024


@pytest.fixture
def proxy(shared: Proxy) -> Iterator[Proxy]:
    """Afterwards nothing of the clients and programs is left in the gateway."""
    yield from shared.checked()
    answers(shared)
    shared.close_programs()


def answers(proxy: Proxy) -> None:
    """The proxy still serves others."""
    program = proxy.answering(OK)
    with proxy.client(proxy.host(program.port)) as client:
        assert client.get("/").text == "ok"


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found is not None, answer[:200]
    return int(found[1])


def refused(proxy: Proxy, head: str, body: bytes = b"") -> bytes:
    """The proxy's answer to a request of which the program gets nothing."""
    program = proxy.program(echo_request)
    host = proxy.host(program.port)
    key = f"Authorization: Bearer {ADMIN_KEY}"
    answer = proxy.exchanged(head.format(host=host, key=key).encode("latin-1") + body)
    assert not program.connections
    return answer


@pytest.mark.parametrize(
    "head",
    [
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nContent-Length: +4\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nTransfer-Encoding: xchunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nTransfer-Encoding : chunked\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nX: a\r\n folded\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n{key}\nX: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nX: a\rY: b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nX: a\0b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n{key}\r\n: empty\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n{key}\r\nBad Name: x\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n{key}\r\n\r\n",
        "GET / HTTP/1.1\r\n{key}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}/@evil\r\n{key}\r\n\r\n",
        "GET / HTTP/3.0\r\nHost: {host}\r\n{key}\r\n\r\n",
        "GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n",
        "CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n",
        "\r\nGET / HTTP/1.1 x\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ],
)
def test_a_head_that_servers_may_read_differently_is_refused(proxy: Proxy, head: str) -> None:
    answer = refused(proxy, head)
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_head_that_is_too_large_is_refused(proxy: Proxy) -> None:
    large = "X: " + "a" * 70_000
    assert status_of(refused(proxy, f"GET / HTTP/1.1\r\nHost: {{host}}\r\n{large}\r\n\r\n")) == 431
    assert status_of(refused(proxy, f"GET / HTTP/1.1\r\nHost: {{host}}\r\n{large}" * 2)) == 431


def test_a_malformed_chunk_ends_the_request(proxy: Proxy) -> None:
    """The program gets no end of the body, so it does not take the part for the whole."""
    received: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        received.append(read_all(connection))

    program = proxy.program(serve)
    head = get(proxy.host(program.port), "/", "Transfer-Encoding: chunked").replace(b"GET", b"POST", 1)
    answer = proxy.exchanged(head + b"4\r\nabcd\r\nxyz\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n")
    assert status_of(answer) == 400
    wait_until(lambda: received)
    assert b"abcd" in received[0]
    assert not received[0].endswith(b"0\r\n\r\n")
    assert b"smuggled" not in received[0]


def bad_answers() -> Iterator[tuple[str, bytes]]:
    yield "nonsense", b"\x16\x03\x01 nonsense\r\n\r\n"
    yield "nothing", b""
    yield "half a head", b"HTTP/1.1 200 OK\r\nContent-"
    yield (
        "both framings",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    )
    yield "two lengths", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"
    yield "bad length", b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok"
    yield "bad encoding", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok"
    yield "bad name", b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n"
    yield "large head", b"HTTP/1.1 200 OK\r\nX: " + bytes(100_000) + b"\r\n\r\n"
    yield "endless head", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000
    yield "unasked upgrade", b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    yield "endless informational answers", b"HTTP/1.1 102 Processing\r\n\r\n" * 100


@pytest.mark.parametrize(("kind", "sent"), list(bad_answers()), ids=[kind for kind, _ in bad_answers()])
def test_an_answer_that_is_not_valid_is_a_bad_gateway(proxy: Proxy, kind: str, sent: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(sent)

    program = proxy.program(serve)
    with proxy.client(proxy.host(program.port)) as client:
        answer = client.get("/")
        assert answer.status_code == 502, (kind, answer.text)
        assert answer.text.startswith("bad_gateway: ")


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n",
    ],
)
def test_a_part_of_an_answer_is_not_taken_for_the_whole(proxy: Proxy, sent: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(sent)

    program = proxy.program(serve)
    answer = proxy.exchanged(get(proxy.host(program.port)))
    assert b"part" in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_bytes_beyond_an_answer_reach_no_other_request(proxy: Proxy) -> None:
    stolen = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
    program = proxy.answering(OK + stolen)
    with proxy.client(proxy.host(program.port)) as client:
        for _ in range(3):
            assert client.get("/").text == "ok"
    assert len(program.connections) == 3


def test_a_flood_is_held_back(proxy: Proxy) -> None:
    """While the client does not read, the gateway takes no more than its buffers hold."""
    sent = [0]

    def flood(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sent[0] += connection.send(bytes(MIB))

    program = proxy.program(flood)
    process = psutil.Process(proxy.gateway.pid)
    before = process.memory_info().rss
    with proxy.raw(get(proxy.host(program.port))) as connection:
        read_head(connection)
        last = [-1]

        def is_held() -> bool:
            was, last[0] = last[0], sent[0]
            select.select([], [], [], 0.3)
            return was == sent[0]

        wait_until(is_held, WITHIN_S)
        assert sent[0] < 64 * MIB
        answers(proxy)
        assert process.memory_info().rss < before + 32 * MIB
    wait_until(lambda: program.connections[0].fileno() == -1, WITHIN_S)


def test_a_program_that_reads_nothing_holds_an_upload_back(proxy: Proxy) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        released.wait()

    released = threading.Event()
    program = proxy.program(serve)
    head = get(proxy.host(program.port), "/", f"Content-Length: {1024 * MIB}")
    with proxy.raw(head) as connection:
        connection.settimeout(1.0)
        sent = 0
        with pytest.raises(TimeoutError):
            while True:
                sent += connection.send(bytes(MIB))
        assert sent < 64 * MIB
        answers(proxy)
    released.set()


def test_an_early_answer_reaches_a_client_that_is_uploading(proxy: Proxy) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)

    program = proxy.program(serve)
    with proxy.raw(get(proxy.host(program.port), "/", f"Content-Length: {MIB}")) as connection:
        connection.sendall(bytes(1000))
        assert status_of(read_all(connection)) == 413


def trickle(connection: socket.socket) -> None:
    read_head(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n")
        select.select([connection], [], [], 0.2)


def test_a_slow_program_does_not_delay_others(proxy: Proxy) -> None:
    """A trickled head ends after 20 s; a program that thinks may do so for as long as it likes."""
    program = proxy.program(trickle)
    with ExitStack() as exits:
        request = get(proxy.host(program.port), "/", "Connection: close")
        slow = [exits.enter_context(proxy.raw(request)) for _ in range(20)]
        wait_until(lambda: len(program.connections) == len(slow), WITHIN_S)
        began = time.monotonic()
        answers(proxy)
        assert time.monotonic() - began < 2
        slow[0].settimeout(60)
        assert status_of(read_all(slow[0])) == 502


def test_after_an_upgrade_a_program_may_speak_anything(proxy: Proxy) -> None:
    """Malformed frames are the client's matter; the connection is never used for another request."""

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        head = b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        connection.sendall(head + b"\xff\xff\xff" + OK)

    program = proxy.program(serve)
    with proxy.raw(get(proxy.host(program.port), "/", *UPGRADE)) as connection:
        assert read_head(connection).startswith(b"HTTP/1.1 101 ")
        connection.sendall(get(proxy.host(program.port)))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b"\xff\xff\xff" + OK
    assert len(program.connections) == 1


def test_another_protocol_than_the_one_asked_for_is_refused(proxy: Proxy) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")

    program = proxy.program(serve)
    assert (
        status_of(proxy.exchanged(get(proxy.host(program.port), "/", *UPGRADE, "Connection: close"))) == 502
    )


def test_http2_is_not_offered_to_programs(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    with proxy.client(proxy.host(program.port), Connection="Upgrade", Upgrade="h2c") as client:
        assert not [line for line in client.get("/").json() if line.startswith("upgrade")]


def endless_events(connection: socket.socket) -> None:
    head = read_head(connection)
    if b"upgrade: websocket" in head.lower():
        connection.sendall(b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    else:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.settimeout(0.05)
    while True:
        connection.sendall(b"data\n")
        try:
            if not connection.recv(1000):
                return
        except TimeoutError:
            continue


@pytest.mark.parametrize("fields", [(), UPGRADE], ids=["events", "websocket"])
def test_a_client_that_is_killed_leaves_nothing(proxy: Proxy, fields: tuple[str, ...]) -> None:
    # Sockets, because threads open files of the database when they are needed.
    before = connections_of(proxy.gateway.pid)
    kill_clients(proxy, fields)
    wait_until(lambda: connections_of(proxy.gateway.pid) <= before, WITHIN_S)


def kill_clients(proxy: Proxy, fields: tuple[str, ...]) -> None:
    program = proxy.program(endless_events)
    clients = [proxy.raw(get(proxy.host(program.port), "/", *fields)) for _ in range(20)]
    for client in clients:
        read_head(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        client.close()
    wait_until(lambda: all(each.fileno() == -1 for each in program.connections), WITHIN_S)


def test_connections_that_say_nothing_end(proxy: Proxy) -> None:
    with proxy.raw(b"GET / HTTP/1.1\r\n") as connection:
        connection.settimeout(30)
        assert status_of(read_all(connection)) == 408


def test_an_address_has_a_limit_of_open_requests(proxy: Proxy) -> None:
    program = proxy.program(lambda connection: drop(read_all(connection)))  # and no answer
    request = get(proxy.host(program.port), "/", "Connection: close")
    with ExitStack() as exits:
        for _ in range(REQUESTS_PER_NETWORK):
            exits.enter_context(proxy.raw(request))
        wait_until(lambda: len(program.connections) == REQUESTS_PER_NETWORK, 60)
        assert status_of(proxy.exchanged(request)) == 429
    wait_until(lambda: all(each.fileno() == -1 for each in program.connections), 60)


def drop(_data: bytes) -> None:
    """Nothing is done with it."""


def ended(begin: Callable[[], socket.socket], act: Callable[[], object]) -> None:
    """The stream ends when something is killed."""
    with begin() as connection:
        assert read_head(connection).startswith(b"HTTP/1.1 200 ")
        act()
        connection.settimeout(30)
        read_all(connection)


def test_a_killed_gateway_ends_the_streams_and_leaves_nothing(proxy: Proxy) -> None:
    program: Program = proxy.program(endless_events)
    ended(lambda: proxy.raw(get(proxy.host(program.port))), proxy.gateway.kill)
    wait_until(lambda: program.connections[0].fileno() == -1, WITHIN_S)
    proxy.gateway.start()


def test_a_stopping_gateway_waits_for_an_answer(proxy: Proxy) -> None:
    program = proxy.program(endless_events)

    def stop() -> None:
        assert proxy.gateway.stop() == 0

    ended(lambda: proxy.raw(get(proxy.host(program.port))), stop)
    proxy.gateway.start()
