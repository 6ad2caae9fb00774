"""Ten thousand requests that are almost right: each is answered or hung up on, and nothing breaks."""

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.examples import made_of_examples
from tests.contract.fuzz import Fuzzer
from tests.nodes import WireNode
from tests.problems import MEMBERS
from tests.service import ADMIN_KEY, Client, running, settings_for

pytestmark = pytest.mark.both_databases

# On each of two databases.
REQUESTS = int(os.environ.get("CONTRACT_REQUESTS", "5000"))
SEED = int(os.environ.get("CONTRACT_SEED", "20261121"))
CALLERS = 8
HANG_S = 5.0
# How long bytes that may be half a request are given before the caller says that no more will come.
PATIENCE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def leaves_the_connection(self) -> bool:
        """Whether another request may follow: the answer had an end and did not say it was the last."""
        return "content-length" in self.headers and self.headers.get("connection") != "close"


class Caller:
    """Sends raw bytes and reads what comes back, over a connection that is kept while it can be."""

    def __init__(self, url: str) -> None:
        address = httpx.URL(url)
        self._address = (address.host, address.port)
        self._connection: socket.socket | None = None

    def send(self, raw: bytes, *, whole: bool) -> Answer | None:
        """The first answer; None where the connection was closed without one."""
        try:
            return self._send(raw, whole=whole)
        except (ConnectionError, EOFError):
            self.close()
            return None

    def _send(self, raw: bytes, *, whole: bool) -> Answer | None:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, timeout=HANG_S)
        connection = self._connection
        connection.settimeout(HANG_S)
        connection.sendall(raw)
        bodiless = raw.lstrip().startswith(b"HEAD ")
        if not whole:
            self._connection = None
            with connection:
                _say_that_is_all(connection)
                return _first_answer(connection, bodiless=bodiless)
        answer = _first_answer(connection, bodiless=bodiless)
        if answer is None or not answer.leaves_the_connection or bodiless:
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _say_that_is_all(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE_S)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(HANG_S)


def _first_answer(connection: socket.socket, *, bodiless: bool) -> Answer | None:
    """Raises TimeoutError where nothing comes, EOFError for half an answer."""
    received = _until(connection, b"", b"\r\n\r\n")
    while received.startswith(b"HTTP/1.1 100"):
        received = _until(connection, received.partition(b"\r\n\r\n")[2], b"\r\n\r\n")
    if not received:
        return None
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    named = (line.partition(": ") for line in lines)
    headers = httpx.Headers([(name, value) for name, _, value in named])
    length = 0 if bodiless else int(headers.get("content-length", "0"))
    while len(body) < length:
        more = connection.recv(65_536)
        if not more:
            raise EOFError(body)
        body += more
    return Answer(int(first.split()[1]), headers, body[:length])


def _until(connection: socket.socket, received: bytes, end: bytes) -> bytes:
    while end not in received:
        more = connection.recv(65_536)
        if not more:
            if received:
                raise EOFError(received)
            return b""
        received += more
    return received


class Judge:
    """What one caller saw."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.statuses: list[int] = []
        self.slowest_s = 0.0

    def look(self, raw: bytes, answer: Answer | None, *, whole: bool, took_s: float) -> None:
        self.slowest_s = max(self.slowest_s, took_s)
        fault = _fault(raw, answer, whole=whole, took_s=took_s)
        if fault:
            self.faults.append(f"{fault}: {raw[:700]!r}")
        if answer is not None:
            self.statuses.append(answer.status)


def _fault(raw: bytes, answer: Answer | None, *, whole: bool, took_s: float) -> str:
    if took_s > HANG_S:
        return f"took {took_s:.1f} s"
    if answer is None:
        return "no answer to a whole request" if whole else ""
    # The nodes here are no machines, and tell no figures of their GPUs: 503 says so.
    if answer.status >= 500 and b'"code":"no_sample"' not in answer.body:
        return f"{answer.status} {answer.body[:300]!r}"
    if answer.status < 300:
        return ""
    if answer.headers.get("content-type") != "application/problem+json":
        return f"{answer.status} is {answer.headers.get('content-type')}"
    if raw.lstrip().startswith(b"HEAD "):
        return ""
    return _fault_of_problem(answer)


def _fault_of_problem(answer: Answer) -> str:
    try:
        document: dict[str, Any] = json.loads(answer.body)
    except ValueError:
        return f"{answer.status} is no JSON: {answer.body[:300]!r}"
    if missing := MEMBERS - document.keys():
        return f"{answer.status} lacks {missing}"
    if document["status"] != answer.status or document["request_id"] != answer.headers.get("x-request-id"):
        return f"{answer.status} says other things than its head: {document}"
    return ""


def _call(url: str, fuzzer: Fuzzer, count: int) -> Judge:
    caller, judge = Caller(url), Judge()
    for _ in range(count):
        raw, whole = fuzzer.request()
        began = time.monotonic()
        try:
            answer = caller.send(raw, whole=whole)
        except TimeoutError:
            judge.faults.append(f"no answer within {HANG_S:g} s: {raw[:700]!r}")
            caller.close()
            continue
        judge.look(raw, answer, whole=whole, took_s=time.monotonic() - began)
    caller.close()
    return judge


@dataclass(frozen=True, slots=True)
class Target:
    """A service with something of everything.

    Attributes:
        known: ids that exist, by the parameter of a path that takes them.
        credential: of a node.
    """

    admin: Client
    document: dict[str, Any]
    known: dict[str, list[str]]
    credential: str


@pytest.fixture
def target(database_url: str, tmp_path: Path) -> Iterator[Target]:
    with (
        running(settings_for(database_url, tmp_path / "data", rate_limits="off")) as service,
        service.client as admin,
    ):
        node, other = WireNode(admin, "gpu-1"), WireNode(admin, "gpu-2")
        node.sync(samples=[_sample(gpu.uuid, gpu.index) for gpu in node.gpus])
        document = admin.get("/openapi.json").json()
        known = {
            **made_of_examples(admin, document),
            # For no node, so that nothing waits for one.
            "instance_id": [admin.create(gpus={"count": 64})["id"] for _ in range(5)],
            "node_id": [other.id],
            "uuid": [gpu.uuid for gpu in node.gpus],
        }
        yield Target(admin, document, known, other.identity.credential)
        node.close()
        other.close()


def _sample(uuid: str, index: int) -> dict[str, object]:
    return {"uuid": uuid, "index": index, "sampled_at": "2026-11-21T08:00:00.000Z"}


@pytest.mark.timeout(300)
def test_nothing_that_is_sent_breaks_it(target: Target) -> None:
    def one(number: int) -> Judge:
        fuzzer = Fuzzer(target.document, target.known, (ADMIN_KEY, target.credential), SEED + number)
        return _call(str(target.admin.base_url), fuzzer, REQUESTS // CALLERS)

    with ThreadPoolExecutor(CALLERS) as pool:
        judges = list(pool.map(one, range(CALLERS)))
    faults = [fault for judge in judges for fault in judge.faults]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    statuses = [status for judge in judges for status in judge.statuses]
    assert len(statuses) > REQUESTS * 0.7, "most of it should be answered"
    # Also 503, `no_sample`, of nodes that have been silent for as long as this takes on a busy machine.
    assert {2, 4} <= {status // 100 for status in statuses}, "both taken and refused"
    assert target.admin.get("/healthz").status_code == 200
