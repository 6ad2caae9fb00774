"""The port proxy: what passes to a program and back."""

import json
import socket
import time
from collections.abc import Iterator

from tests.gateway.port_proxy import Proxy, get, read_all, read_head
from tests.service import ADMIN_KEY
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def echo_request(connection: socket.socket) -> None:
    """Answers with the request's head, on one connection."""
    while head := read_head(connection):
        answer = json.dumps(head.decode("latin-1").split("\r\n")).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))


def test_a_request_reaches_the_program_with_its_own_path(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    host = proxy.host(program.port)
    with proxy.client(host) as client:
        answer = client.get("/a%20b/c?x=1&y=%2F")
        assert answer.status_code == 200, answer.text
        assert answer.json()[0] == "GET /a%20b/c?x=1&y=%2F HTTP/1.1"
        assert f"host: {host}" in answer.json()


def test_connections_are_kept_for_the_next_request(proxy: Proxy) -> None:
    program = proxy.answering(OK)
    with proxy.client(proxy.host(program.port)) as client:
        for _ in range(5):
            assert client.get("/").text == "ok"
    assert len(program.connections) == 1


def test_our_credentials_and_forged_fields_never_reach_the_program(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    forged = {
        "X-Forwarded-For": "1.2.3.4", "X_Forwarded_For": "1.2.3.4", "X-Real-IP": "1.2.3.4",
        "Forwarded": "for=1.2.3.4", "Proxy-Authorization": "Basic x", "TE": "trailers",
        "Connection": "keep-alive, x-secret", "X-Secret": "of this hop", "X-Kept": "yes",
        "Cookie": "a=1; __Host-mooring-port=x; mooring-port=y; b=2",
    }  # fmt: skip
    with proxy.client(proxy.host(program.port), **forged) as client:
        head = "\n".join(client.get("/").json())
    for absent in (ADMIN_KEY, "1.2.3.4", "Basic x", "of this hop", "mooring-port", "trailers"):
        assert absent not in head
    assert "x-forwarded-for: 127.0.0.1" in head
    assert "x-forwarded-proto: http" in head
    assert f"x-forwarded-host: {proxy.host(program.port)}" in head
    assert "cookie: a=1; b=2" in head
    assert "x-kept: yes" in head


def test_an_upload_and_a_download_pass_unchanged(proxy: Proxy) -> None:
    content = bytes(range(256)) * (8 * MIB // 256)

    def echo_body(connection: socket.socket) -> None:
        length = next(
            int(line.partition(":")[2])
            for line in read_head(connection).decode().split("\r\n")
            if line.lower().startswith("content-length")
        )
        body = b""
        while len(body) < length:
            body += connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (length, body))

    program = proxy.program(echo_body)
    with proxy.client(proxy.host(program.port)) as client:
        assert client.put("/file", content=content).content == content


def test_a_body_of_unknown_length_is_streamed(proxy: Proxy) -> None:
    """The program gets the first part before the client has the second."""
    received: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(65536)
            received.append(body)
        connection.sendall(OK)

    def parts() -> Iterator[bytes]:
        yield b"first"
        wait_until(lambda: any(b"first" in each for each in received))
        yield b"second"

    program = proxy.program(serve)
    with proxy.client(proxy.host(program.port)) as client:
        assert client.post("/", content=parts()).text == "ok"
    assert b"second" in received[-1]


def test_events_pass_at_once(proxy: Proxy) -> None:
    """The first byte of an event stream passes in less than 20 ms; the program sends the next one later."""
    sent_at: list[float] = []

    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while True:
            sent_at.append(time.monotonic())
            connection.sendall(b"data: x\n\n")
            if len(sent_at) == 20:
                return
            wait_until(lambda: len(received_at) == len(sent_at))

    received_at: list[float] = []
    program = proxy.program(serve)
    with proxy.client(proxy.host(program.port)) as client, client.stream("GET", "/") as answer:
        for _event in answer.iter_raw():
            received_at.append(time.monotonic())
    took = sorted(r - s for s, r in zip(sent_at, received_at, strict=True))
    assert took[len(took) // 2] < 0.02, took


def test_a_head_request_has_no_body(proxy: Proxy) -> None:
    program = proxy.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    with proxy.client(proxy.host(program.port)) as client:
        for _ in range(2):
            answer = client.head("/")
            assert (answer.status_code, answer.headers["content-length"]) == (200, "1000")


def test_pipelined_requests_are_answered_in_order(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    host = proxy.host(program.port)
    requests = [get(host, "/1"), get(host, "/2"), get(host, "/3", "Connection: close")]
    answer = proxy.exchanged(b"".join(requests))
    paths = [answer.index(f"GET /{number} HTTP".encode()) for number in (1, 2, 3)]
    assert paths == sorted(paths)
    assert answer.count(b"HTTP/1.1 200 ") == 3


def test_an_answer_that_ends_with_its_connection_is_passed(proxy: Proxy) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")

    program = proxy.program(serve)
    with proxy.client(proxy.host(program.port)) as client:
        for _ in range(2):
            assert client.get("/").text == "until the end"


def test_a_connection_that_the_program_closes_meanwhile_is_replaced(proxy: Proxy) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(OK)
        connection.recv(1, socket.MSG_PEEK)  # until the next request has been sent

    program = proxy.program(serve)
    with proxy.client(proxy.host(program.port)) as client:
        for _ in range(3):
            assert client.get("/").text == "ok"


def test_a_body_is_asked_for_by_the_proxy(proxy: Proxy) -> None:
    program = proxy.program(echo_request)
    host = proxy.host(program.port)
    head = get(host, "/", "Content-Length: 4", "Expect: 100-continue", "Connection: close")
    with proxy.raw(head) as connection:
        assert read_head(connection) == b"HTTP/1.1 100 \r\n\r\n"
        connection.sendall(b"\r\n\r\n")
        assert b"expect" not in read_all(connection).lower()


def websocket_echo(connection: socket.socket) -> None:
    head = read_head(connection)
    assert b"upgrade: websocket" in head.lower()
    connection.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello"
    )
    while data := connection.recv(65536):
        connection.sendall(data)


UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")


def test_after_an_upgrade_bytes_pass_both_ways(proxy: Proxy) -> None:
    """Also those that come with the head."""
    program = proxy.program(websocket_echo)
    with proxy.raw(get(proxy.host(program.port), "/", *UPGRADE) + b"begun") as connection:
        head = read_head(connection)
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"upgrade: websocket" in head.lower()
        connection.sendall(b" and \x00\xff")
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b"hellobegun and \x00\xff"


def test_a_declined_upgrade_is_a_usual_answer(proxy: Proxy) -> None:
    program = proxy.answering(OK)
    host = proxy.host(program.port)
    answer = proxy.exchanged(get(host, "/", *UPGRADE) + get(host, "/", "Connection: close"))
    assert answer.count(b"ok") == 2


def test_a_program_sets_cookies_for_its_own_host_only(proxy: Proxy) -> None:
    program = proxy.answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
        b"Set-Cookie: a=1; Domain=apps.test; Path=/; HttpOnly\r\nSet-Cookie: mooring-port=stolen\r\n"
        b"Set-Cookie: __Host-mooring-port=x; Secure; Path=/\r\nSet-Cookie: b=2;domain=.test\r\n"
        b'Alt-Svc: h3=":443"\r\nX-Kept: 1\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\nok'
    )
    with proxy.client(proxy.host(program.port)) as client:
        answer = client.get("/")
    assert answer.headers.get_list("set-cookie") == ["a=1; Path=/; HttpOnly", "b=2"]
    assert "x-kept" in answer.headers
    assert not {"alt-svc", "x-hop"} & set(answer.headers)


def test_the_audit_log_has_one_row_for_many_requests(proxy: Proxy) -> None:
    def serve(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

    program = proxy.program(serve)
    with proxy.client(proxy.host(program.port)) as client:
        for _ in range(4):
            client.get("/")

    def rows() -> list[object]:
        found = proxy.admin.items("/v1/audit-log", action="instance.port")
        return [row for row in found if row["after"]["port"] == program.port]

    wait_until(lambda: len(rows()) == 1)
