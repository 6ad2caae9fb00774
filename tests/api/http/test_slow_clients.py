"""Clients that trickle, stall or never read: each has its time. A node's frames may come for hours."""

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
from mooring.api.http.server import ConnectionLimits
from tests.nodes import WireNode, seen
from tests.problems import MEMBERS, problem
from tests.service import ADMIN_KEY, Client, RunningService, running, settings_for
from tests.testbed.waiting import wait_until

LIMITS = ConnectionLimits(
    head_s=0.5, body_s=1, bytes_per_s=1000, frames_s=0.7, linger_s=0.1, reader_s=1, connections=12
)
AUTHORIZED = f"Host: a\r\nAuthorization: Bearer {ADMIN_KEY}\r\nContent-Type: application/json\r\n".encode()
POST = b"POST /v1/instances HTTP/1.1\r\n" + AUTHORIZED
# What a loaded machine adds to a time-out.
SLACK_S = 1.5
# A timer counts from when the event loop began its iteration, which is before what it is for.
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


class Raw:
    """A connection whose bytes the test says one by one."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.began = time.monotonic()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def trickle(self, data: bytes, interval_s: float = 0.05) -> None:
        """Byte by byte, until it is told to stop or all is sent."""
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
        """One answer, which ends with a JSON object."""
        received = b""
        while not received.endswith(b"}"):
            received += self.socket.recv(65_536)
        return received

    def rest(self) -> tuple[bytes, float]:
        """What else is said until the connection ends, and how long the connection lasted."""
        self.socket.settimeout(20)
        received = b""
        try:
            while more := self.socket.recv(65_536):
                received += more
        except ConnectionError:
            pass
        return received, time.monotonic() - self.began


@contextmanager
def raw(service: RunningService, receive_buffer: int | None = None) -> Iterator[Raw]:
    url = httpx.URL(service.url)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made = Raw(connection)  # its time begins here: the server's may begin before `connect` is over
        connection.connect((url.host, url.port))
        yield made


def refusal(received: bytes, status: int, code: str) -> None:
    """The last answer of the connection is this problem."""
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
def test_a_head_that_does_not_arrive_is_cut_off(service: RunningService, head: bytes) -> None:
    with raw(service) as slow:
        slow.trickle(head)
        received, lasted = slow.rest()
    refusal(received, 408, "request_timeout")
    assert LIMITS.head_s - EARLY_S <= lasted < LIMITS.head_s + SLACK_S


def test_the_second_head_of_a_connection_has_no_more_time_than_the_first(service: RunningService) -> None:
    with raw(service) as slow:
        slow.send(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert slow.answer().startswith(b"HTTP/1.1 200")
        slow.began = time.monotonic()
        slow.trickle(b"\r\nGET /healthz HTTP/1.1\r\nHost: " + b"a" * 1000)
        received, lasted = slow.rest()
    refusal(received, 408, "request_timeout")
    assert lasted < LIMITS.head_s + SLACK_S


def test_a_connection_at_rest_between_two_requests_is_not_cut_off(admin: Client) -> None:
    before = admin.get("/healthz")
    threading.Event().wait(LIMITS.head_s + 0.3)
    after = admin.get("/healthz")
    assert before.extensions["network_stream"] is after.extensions["network_stream"]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n"]
)
def test_a_body_that_trickles_is_cut_off(service: RunningService, framing: bytes) -> None:
    with raw(service) as slow:
        slow.send(POST + framing)
        slow.trickle(b" " * 1000)
        received, lasted = slow.rest()
    refusal(received, 408, "request_timeout")
    assert LIMITS.body_s - EARLY_S <= lasted < LIMITS.body_s + SLACK_S


def test_a_body_that_is_merely_slow_arrives(service: RunningService) -> None:
    body = b'{"image": "a", "gpus": {"count": 64}}'.ljust(4500)
    with raw(service) as slow:
        slow.send(POST + b"Connection: close\r\nContent-Length: 4500\r\n\r\n")
        for start in range(0, 4500, 300):  # 3000 bytes a second, three times what is asked
            slow.send(body[start : start + 300])
            threading.Event().wait(0.1)
        received, lasted = slow.rest()
    assert received.startswith(b"HTTP/1.1 201"), received
    assert lasted > LIMITS.body_s


def test_a_refused_body_is_not_listened_to_for_long(service: RunningService) -> None:
    with raw(service) as slow:
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
    ("first", "then", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 16_384, 431),
        (b"GET / HTTP/1.1\r\n", b"X: x\r\n" * 2000, 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: x\r\n" * 2000, 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"x" * 16_384, 431),
    ],
    ids=["one header", "many headers", "many trailers", "one trailer"],
)
def test_endless_heads_and_trailers_end(
    service: RunningService, first: bytes, then: bytes, status: int
) -> None:
    with raw(service) as endless:
        endless.send(first)
        try:
            for _ in range(1000):
                endless.send(then)
        except OSError:
            return  # it was ended while we were still sending, and the reset came before the answer
        received, _lasted = endless.rest()
    refusal(received, status, "headers_too_large")


def test_an_endless_pipeline_ends(service: RunningService) -> None:
    with raw(service) as pipe, pytest.raises(OSError):
        while time.monotonic() - pipe.began < 10:
            pipe.send(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)


def test_more_headers_or_parameters_than_anybody_needs_are_431(admin: Client) -> None:
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
    # As many values as a command can hold: all separators may also stand within strings.
    fits = {"image": "a", "command": [",{[" * 80] * 1024, "gpus": {"count": 64}}
    assert admin.post("/v1/instances", json=fits).status_code == 201


def test_a_reader_that_takes_nothing_is_cut_off(service: RunningService) -> None:
    wait_until(lambda: _connections(service) == 0, 20)
    with raw(service, receive_buffer=4096) as idle:
        idle.send(b"GET /docs/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: _connections(service) == 1)
        wait_until(lambda: _connections(service) == 0, 15)
        assert time.monotonic() - idle.began >= LIMITS.reader_s


def test_a_slow_reader_gets_everything(service: RunningService) -> None:
    with raw(service, receive_buffer=4096) as slow:
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


def test_beyond_the_most_connections_an_idle_one_gives_way(service: RunningService) -> None:
    with ExitStack() as held:
        for _ in range(LIMITS.connections * 3):
            held.enter_context(raw(service))
        with service.client as admin:
            assert admin.get("/v1/me").status_code == 200
        assert _connections(service) <= LIMITS.connections + 2


def test_when_all_connections_are_busy_one_more_is_refused(service: RunningService) -> None:
    poll = b"GET /v1/events?after=999999999&wait_s=60 HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
    with ExitStack() as held:
        for _ in range(LIMITS.connections):
            held.enter_context(raw(service)).send(poll)
        wait_until(lambda: len(service.service._server._context.open_streams) == LIMITS.connections)
        with raw(service) as late:
            received, _lasted = late.rest()
        refusal(received, 503, "unavailable")
        assert b"Retry-After: " in received
    wait_until(lambda: _connections(service) == 0)


def test_a_nodes_frames_may_come_for_longer_than_any_body(service: RunningService, admin: Client) -> None:
    node = WireNode(admin, "streamer")
    node.sync()
    made = admin.create()
    admin.wait(made["id"], "scheduled")
    (assignment,) = node.sync().assignments
    node.sync(seen(assignment, "running"))
    answers: list[httpx.Response] = []

    def ask() -> None:
        with service.client as own:
            path = f"/v1/instances/{made['id']}/exec"
            answers.append(own.post(path, json={"command": ["sleep"], "timeout_s": 30}))

    asking = threading.Thread(target=ask)
    asking.start()
    (stream,) = wait_until(node.stream_requests)

    def frames() -> Iterator[bytes]:
        began = time.monotonic()
        while time.monotonic() - began < 2 * LIMITS.body_s:
            yield b"{}\n"
            threading.Event().wait(LIMITS.frames_s / 4)
        yield b'{"exit_code": 0}\n'

    assert node.http.post(f"/agent/v1/streams/{stream.id}", content=frames()).status_code == 204
    asking.join(20)
    assert answers[0].json()["exit_code"] == 0
    # One that falls silent is not waited for.
    asking = threading.Thread(target=ask)
    asking.start()
    (stream,) = wait_until(node.stream_requests)
    head = f"POST /agent/v1/streams/{stream.id} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    with raw(service) as silent:
        silent.send(
            f"{head}Authorization: {node.http.headers['Authorization']}\r\n\r\n3\r\n{{}}\n\r\n".encode()
        )
        _received, lasted = silent.rest()
    assert LIMITS.frames_s - EARLY_S <= lasted < LIMITS.frames_s + SLACK_S
    service.service._server._context.channels.break_off()
    asking.join(20)
    node.close()


def test_an_upgrade_that_is_not_taken_ends_nothing(service: RunningService) -> None:
    with raw(service) as client:
        poll = (
            b"GET /v1/events?after=999999999&wait_s=1.2 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        )
        client.send(poll + AUTHORIZED + b"\r\n")
        client.socket.settimeout(10)
        assert client.socket.recv(65_536).startswith(b"HTTP/1.1 200")
