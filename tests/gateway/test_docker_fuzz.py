"""Ten thousand malformed inputs to the Docker listener: no crash, no leak, and no effect on others."""

import http.client
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from tests.service import ADMIN_KEY
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import GatewayProcess, ServerProcess, running_gateway

HOST = "127.0.0.1"
INPUTS = 10_000
SEED = 20_261_127
MAX_GROWTH_MIB = 64
ANSWER_WITHIN_S = 10.0

_BASES = (
    (b"GET", b"/v1.43/containers/json?all=1", b""),
    (b"GET", b"/v1.43/containers/abc/logs?stdout=1&tail=all&since=0", b""),
    (
        b"POST",
        b"/v1.43/containers/create?name=x",
        b'{"Image":"busybox","Cmd":["true"],"HostConfig":{"Memory":64}}',
    ),
    (b"POST", b"/v1.43/containers/abc/attach?stream=1&stdin=1", b""),
    (b"POST", b"/v1.43/containers/abc/exec", b'{"Cmd":["sh"],"Tty":true,"Env":["A=b"]}'),
    (b"POST", b"/v1.43/exec/abc/start", b'{"Detach":false,"Tty":true,"ConsoleSize":[1,2]}'),
    (b"POST", b"/v1.43/containers/abc/wait?condition=removed", b""),
    (b"POST", b"/v1.43/containers/abc/resize?h=1&w=1", b""),
    (b"PUT", b"/v1.43/containers/abc/archive?path=/", b"\0" * 512),
    (b"GET", b'/v1.43/events?filters={"type":["x"]}', b""),
    (b"DELETE", b"/v1.43/containers/abc?force=1", b""),
    (b"POST", b"/v1.43/images/create?fromImage=a", b""),
)
_POISON = (
    b"\0", b"\r\n", b"\r\n\r\n", b"%00", b"%", b"%zz", b"../" * 8, b"\xff\xfe", b"{" * 3000, b'"' * 5,
    b"[1e999]",
    b"-1", b"9" * 40, b"A" * 70_000, b"Transfer-Encoding: chunked\r\n", b"Content-Length: 99999999999\r\n",
    b"Upgrade: tcp\r\nConnection: Upgrade\r\n", b"\xed\xa0\x80", b"null", b"\\ud800", b"?", b"&" * 200, b" ",
)  # fmt: skip


class Inputs:
    """Requests that a generator breaks. Half of them have a valid key."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self) -> bytes:
        draw = self._random
        if draw.random() < 0.1:
            return draw.randbytes(draw.randint(0, 2000))
        method, target, body = draw.choice(_BASES)
        if draw.random() < 0.3 and body:
            body = self._broken(body)
        if draw.random() < 0.3:
            target = self._broken(target).replace(b"\n", b"").replace(b" ", b"")
        key = (
            f"Bearer {ADMIN_KEY}".encode()
            if draw.random() < 0.5
            else draw.choice((b"Bearer x", b"", b"Basic \xff"))
        )
        length = len(body) if draw.random() < 0.9 else draw.choice((0, len(body) + 7, 10**12, -1))
        head = b"%s %s HTTP/1.1\r\nHost: a\r\nAuthorization: %s\r\n" % (method, target, key)
        head += b"Content-Length: %d\r\n" % length
        if draw.random() < 0.2:
            head += b"Connection: Upgrade\r\nUpgrade: tcp\r\n"
        whole = head + b"\r\n" + body
        if draw.random() < 0.5:
            whole = self._broken(whole)
        return whole if draw.random() < 0.8 else whole[: draw.randint(0, len(whole))]

    def _broken(self, data: bytes) -> bytes:
        draw = self._random
        for _ in range(draw.randint(1, 4)):
            at = draw.randint(0, len(data))
            match draw.randint(0, 3):
                case 0:
                    data = data[:at] + draw.choice(_POISON) + data[at:]
                case 1:
                    data = data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at + 1 :]
                case 2:
                    data = data[:at] + data[at + draw.randint(1, 20) :]
                case _:
                    data = data[:at] + data[at : at + 30] * draw.randint(2, 5) + data[at:]
        return data


@pytest.fixture(scope="module")
def docker_gateway(
    server: ServerProcess, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(server.environment, workspace, folder, HOST, docker=True) as gateway:
        yield gateway


def _send(port: int, data: bytes) -> None:
    """Send an input, read what comes back at once, and leave."""
    with suppress(OSError), socket.create_connection((HOST, port), timeout=ANSWER_WITHIN_S) as connection:
        connection.sendall(data)
        connection.settimeout(0.02)
        connection.recv(4096)


def _listed(port: int) -> int:
    """The status of a valid request of somebody else."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_WITHIN_S)
    try:
        connection.request("GET", "/v1.43/containers/json", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        answer = connection.getresponse()
        assert json.loads(answer.read()) == []
        return answer.status
    finally:
        connection.close()


def test_malformed_inputs_harm_nobody(docker_gateway: GatewayProcess, server: ServerProcess) -> None:
    port = docker_gateway.docker_port
    inputs, process = Inputs(SEED), psutil.Process(docker_gateway.pid)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda data: _send(port, data), [inputs.one() for _ in range(INPUTS // 10)]):
            pass
        before_mib, files = process.memory_info().rss / 2**20, process.num_fds()
        for round_ in range(9):
            given = [inputs.one() for _ in range(INPUTS // 10)]
            for _ in pool.map(lambda data: _send(port, data), given):
                pass
            assert _listed(port) == 200, round_
    wait_until(lambda: process.num_fds() <= files + 16, 60)
    growth_mib = process.memory_info().rss / 2**20 - before_mib
    assert growth_mib < MAX_GROWTH_MIB, growth_mib
    assert "Traceback" not in docker_gateway.printed(), docker_gateway.tail()
    with server.client as admin:
        assert admin.items("/v1/instances") == []


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /v1.10/info HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"GET /info HTTP/1.1\r\nHost: a\r\n\r\n", b"401"),
        (b"GET /a%ff HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 150_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"POST /containers/create HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", b"401"),
    ],
)
def test_an_invalid_request_has_an_answer(
    docker_gateway: GatewayProcess, given: bytes, status: bytes
) -> None:
    port = docker_gateway.docker_port
    with socket.create_connection((HOST, port), timeout=ANSWER_WITHIN_S) as connection:
        connection.sendall(given)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert b'{"message": ' in answer
