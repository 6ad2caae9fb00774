"""Timeouts of clients that trickle, stall or never read. A node may send frames for hours."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from mooring.api.http.edge import MAX_HEADERS, MAX_PARAMETERS
from mooring.streams.http_protocol import ConnectionLimits
from tests.problems import MEMBERS, problem
from tests.service import ADMIN_KEY, Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

LIMITS = ConnectionLimits(head_s=0.5, body_s=1, bytes_per_s=1000, linger_s=0.1, reader_s=1, connections=12)
AUTHORIZED = f"Host: a\r\nAuthorization: Bearer {ADMIN_KEY}\r\nContent-Type: application/json\r\n".encode()
POST = b"POST /v1/instances HTTP/1.1\r\n" + AUTHORIZED
# A loaded machine exceeds a timeout by up to this.
SLACK_S = 1.5
# A timer counts from the start of the event loop's iteration, slightly before the event that starts it.
EARLY_S = 0.05


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, migrated_template: Callable[[str], str]
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("slow")
    template = Path(migrated_template("sqlite").removeprefix("sqlite:///"))
    (folder / "mooring.db").write_bytes(template.read_bytes())
    settings = settings_for(f"sqlite:///{folder / 'mooring.db'}", folder / "data")
    with running(settings, LIMITS) as made:
        yield made


@pytest.fixture
def admin(service: RunningService) -> Iterator[Client]:
    with service.client as made:
        yield made


class RawConnection:
    """A connection over which the test sends raw bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.began = time.monotonic()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def trickle(self, data: bytes, interval_s: float = 0.05) -> None:
        """Send byte by byte until the server answers or all is sent."""
        for byte in data:
            try:
                self.socket.sendall(bytes((byte,)))
            except OSError:
                return
            if self._has_been_answered(interval_s):
                return

    def _has_been_answered(self, within_s: float) -> bool:
        self.socket.settimeout(within_s)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def answer(self) -> bytes:
        """The next answer, which ends with a JSON object."""
        received = b""
        while not received.endswith(b"}"):
            received += self.socket.recv(65_536)
        return received

    def rest(self) -> tuple[bytes, float]:
        """The remaining bytes until the connection ends, and how long the connection lasted."""
        self.socket.settimeout(20)
        received = b""
        try:
            while more := self.socket.recv(65_536):
                received += more
        except ConnectionError:
            pass
        return received, time.monotonic() - self.began


@contextmanager
def raw_connection(service: RunningService, receive_buffer: int | None = None) -> Iterator[RawConnection]:
    url = httpx.URL(service.url)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        # It notes the time before `connect`: the server's timeout may start before `connect` returns.
        made = RawConnection(connection)
        connection.connect((url.host, url.port))
        yield made


def require_last_answer(received: bytes, status: int, code: str) -> None:
    """Fails unless the connection's last answer is this problem."""
    head, _, body = received[received.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), received
    assert b"application/problem+json" in head
    document = json.loads(body)
    assert document.keys() >= MEMBERS
    assert document["code"] == code


def _connections(service: RunningService) -> int:
    return len(service.service._server.server_state.connections)


@pytest.mark.parametrize(
    "head",
    [b"", b"GET /healthz HTTP/1.1\r\nHost: " + b"a" * 1000, b"\r\n" * 1000],
    ids=["nothing", "a head", "line breaks"],
)
def test_a_request_head_that_does_not_arrive_times_out(service: RunningService, head: bytes) -> None:
    with raw_connection(service) as slow:
        slow.trickle(head)
        received, lasted = slow.rest()
    require_last_answer(received, 408, "request_timeout")
    assert LIMITS.head_s - EARLY_S <= lasted < LIMITS.head_s + SLACK_S


def test_the_second_head_of_a_connection_has_the_same_timeout(service: RunningService) -> None:
    with raw_connection(service) as slow:
        slow.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert slow.answer().startswith(b"HTTP/1.1 200")
        slow.began = time.monotonic()
        slow.trickle(b"\r\nGET /healthz HTTP/1.1\r\nHost: " + b"a" * 1000)
        received, lasted = slow.rest()
    require_last_answer(received, 408, "request_timeout")
    assert lasted < LIMITS.head_s + SLACK_S


def test_an_idle_connection_between_two_requests_stays_open(admin: Client) -> None:
    before = admin.get("/healthz")
    threading.Event().wait(LIMITS.head_s + 0.3)
    after = admin.get("/healthz")
    assert before.extensions["network_stream"] is after.extensions["network_stream"]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n"]
)
def test_a_body_that_trickles_times_out(service: RunningService, framing: bytes) -> None:
    with raw_connection(service) as slow:
        slow.send(POST + framing)
        slow.trickle(b" " * 1000)
        received, lasted = slow.rest()
    require_last_answer(received, 408, "request_timeout")
    assert LIMITS.body_s - EARLY_S <= lasted < LIMITS.body_s + SLACK_S


def test_a_slow_body_above_the_minimum_rate_is_accepted(service: RunningService) -> None:
    body = b'{"image": "a", "gpus": {"count": 64}}'.ljust(4500)
    with raw_connection(service) as slow:
        slow.send(POST + b"Connection: close\r\nContent-Length: 4500\r\n\r\n")
        for start in range(0, 4500, 300):  # 3000 bytes a second, three times the minimum
            slow.send(body[start : start + 300])
            threading.Event().wait(0.1)
        received, lasted = slow.rest()
    assert received.startswith(b"HTTP/1.1 201"), received
    assert lasted > LIMITS.body_s


def test_a_rejected_body_is_read_for_a_short_time_only(service: RunningService) -> None:
    with raw_connection(service) as slow:
        slow.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert slow.answer().startswith(b"HTTP/1.1 200")
        slow.began = time.monotonic()
        slow.send(b"POST /v1/instances HTTP/1.1\r\nHost: a\r\nContent-Length: 900000\r\n\r\n")
        assert slow.answer().startswith(b"HTTP/1.1 401")
        deadline = time.monotonic() + 10
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                slow.send(b" " * 400)
                threading.Event().wait(0.02)
        assert time.monotonic() - slow.began < LIMITS.body_s


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 16_384),
        (b"GET / HTTP/1.1\r\n", b"X: x\r\n" * 2000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: x\r\n" * 2000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"x" * 16_384),
    ],
    ids=["one header", "many headers", "many trailers", "one trailer"],
)
def test_endless_heads_and_trailers_are_rejected(service: RunningService, first: bytes, then: bytes) -> None:
    with raw_connection(service) as endless:
        endless.send(first)
        try:
            for _ in range(1000):
                endless.send(then)
        except OSError:
            return  # the server closed the connection, and the reset arrived before the answer
        received, _lasted = endless.rest()
    require_last_answer(received, 431, "headers_too_large")


def test_an_endless_pipeline_is_closed(service: RunningService) -> None:
    with raw_connection(service) as pipe, pytest.raises(OSError):
        while time.monotonic() - pipe.began < 10:
            pipe.send(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)


def test_too_many_headers_or_parameters_are_431(admin: Client) -> None:
    few = {f"X-{number}": "x" for number in range(MAX_HEADERS - 10)}
    assert admin.get("/v1/instances", headers=few).status_code == 200
    problem(
        admin.get("/v1/instances", headers={f"X-{number}": "x" for number in range(MAX_HEADERS)}),
        431,
        "headers_too_large",
    )
    labels = "&".join(["label=a:b"] * 16)
    assert admin.get(f"/v1/instances?{labels}").status_code == 200
    problem(admin.get(f"/v1/instances?{'&'.join(['a=b'] * (MAX_PARAMETERS + 1))}"), 431, "headers_too_large")


def test_a_body_of_too_many_values_is_rejected_before_validation(admin: Client) -> None:
    bodies = {
        "fields": b"{" + b",".join(b'"k%d":1' % number for number in range(50_000)) + b"}",
        "items": b'{"image":"a","command":[' + b",".join([b'""'] * 50_000) + b"]}",
        "deep": b'{"image":"a","env":{"A":' + b"[[[[0],[0]],[[0],[0]]]," * 5000 + b"0" + b"]" * 5000 + b"}}",
    }
    for name, body in bodies.items():
        answer = admin.post("/v1/instances", content=body, headers={"Content-Type": "application/json"})
        # Validation, which takes long and answers 422 with one error per value, has not run.
        status, code = (400, "bad_json") if name == "deep" else (413, "body_too_large")
        problem(answer, status, code)
        assert len(answer.content) < 1024, name
    # The largest command is accepted; separators within strings do not count as values.
    fits = {"image": "a", "command": [",{[" * 80] * 1024, "gpus": {"count": 64}}
    assert admin.post("/v1/instances", json=fits).status_code == 201


def test_a_reader_that_reads_nothing_is_disconnected(service: RunningService) -> None:
    wait_until(lambda: _connections(service) == 0, 20)
    with raw_connection(service, receive_buffer=4096) as idle:
        idle.send(b"GET /docs/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: _connections(service) == 1)
        wait_until(lambda: _connections(service) == 0, 15)
        assert time.monotonic() - idle.began >= LIMITS.reader_s


def test_a_slow_reader_gets_the_whole_answer(service: RunningService) -> None:
    with raw_connection(service, receive_buffer=4096) as slow:
        slow.send(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = b""
        while more := slow.socket.recv(16_384):
            received += more
            if len(received) < 100_000:
                threading.Event().wait(0.1)
        lasted = time.monotonic() - slow.began
    head, _, body = received.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["openapi"].startswith("3.1")
    assert lasted > 0.3


def test_at_the_connection_limit_an_idle_connection_is_closed(service: RunningService) -> None:
    with ExitStack() as held:
        for _ in range(LIMITS.connections * 3):
            held.enter_context(raw_connection(service))
        with service.client as admin:
            assert admin.get("/v1/me").status_code == 200
        assert _connections(service) <= LIMITS.connections + 2


def test_a_connection_over_the_limit_is_rejected_if_all_others_are_busy(service: RunningService) -> None:
    poll = f"GET /v1/events?after={service.newest_seq}&wait_s=60 HTTP/1.1\r\n".encode() + AUTHORIZED + b"\r\n"
    with ExitStack() as held:
        for _ in range(LIMITS.connections):
            held.enter_context(raw_connection(service)).send(poll)
        wait_until(lambda: len(service.service._server._context.open_streams) == LIMITS.connections)
        with raw_connection(service) as late:
            received, _lasted = late.rest()
        require_last_answer(received, 503, "unavailable")
        assert b"Retry-After: " in received
    wait_until(lambda: _connections(service) == 0)


def test_an_ignored_upgrade_does_not_close_the_connection(service: RunningService) -> None:
    with raw_connection(service) as client:
        poll = f"GET /v1/events?after={service.newest_seq}&wait_s=1.2 HTTP/1.1\r\n"
        client.send(poll.encode() + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + AUTHORIZED + b"\r\n")
        client.socket.settimeout(10)
        assert client.socket.recv(65_536).startswith(b"HTTP/1.1 200")
