"""Unmodified programs of others through the port proxy, in real containers: JupyterLab, curl, websockets."""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from mooring.control.instances import port_links
from tests.service import ADMIN_KEY
from tests.testbed.dockerd import DockerNode
from tests.testbed.parts import require
from tests.testbed.python_image import import_jupyter, require_jupyter
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.conftest import Cluster, NewServer
from tests.walk.product import running_gateway
from tests.walk.programs import (
    DOMAIN,
    KEY,
    LAB_TOKEN,
    WITHIN_S,
    Programs,
    running_programs,
    sockets_of,
    status_lines,
)

MIB = 1024 * 1024
LARGE_BYTES = 64 * MIB
# A client that says when its WebSocket is open, and then sends and reads nothing, until it is killed.
SENDING_CLIENT = """
import socket, sys
from websockets.sync.client import connect
url, host, port, key = sys.argv[1:]
stream = connect(url, sock=socket.create_connection((host, int(port))), proxy=None, max_size=None,
                 additional_headers={"Authorization": "Bearer " + key})
stream.send("x" * 2**20)
print(len(stream.recv()), flush=True)
while True:
    stream.send("x" * 2**20)
"""


@pytest.fixture(scope="module")
def programs(
    new_server: NewServer,
    docker_nodes: Callable[[int], list[DockerNode]],
    workspace: Workspace,
    root_address: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Programs]:
    """Shared by all tests here: none of them changes an instance."""
    require_jupyter()
    require("curl")
    [node] = docker_nodes(1)
    folder = tmp_path_factory.mktemp("gateway")
    import_jupyter(node, folder)
    cluster = Cluster(new_server(), [node], tmp_path_factory.mktemp("agents"))
    environment = cluster.server.environment | {
        "MOORING_GATEWAY_DRAIN_S": "0.5",
        "MOORING_PROXY_DOMAIN": DOMAIN,
        "MOORING_PROXY_URL": f"http://{DOMAIN}",
    }
    with running_gateway(environment, workspace, folder, root_address, proxy=True) as gateway:
        yield running_programs(cluster, gateway)
        assert "Traceback" not in gateway.printed(), gateway.tail()
    cluster.clear()
    cluster.close()
    node.remove_containers()


@pytest.fixture
def url(programs: Programs) -> str:
    """Of the program on tornado."""
    return f"http://{programs.host(8000, 'tornado')}"


def large() -> bytes:
    """As in tornado_program.py."""
    return b"".join(hashlib.sha256(bytes([part])).digest() * (MIB // 32) for part in range(64))


# JupyterLab


def executed(stream: ClientConnection, code: str) -> str:
    """The result of code that a kernel executes."""
    header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "s", "version": "5.4"}
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    stream.send(json.dumps(message))
    while True:
        answer: dict[str, Any] = json.loads(stream.recv(timeout=WITHIN_S))
        assert answer["msg_type"] != "error", answer
        if answer["msg_type"] == "execute_result":
            return str(answer["content"]["data"]["text/plain"])


def test_a_notebook_kernel_computes_for_a_program_with_an_api_key(programs: Programs) -> None:
    host = programs.host(8888, "lab")
    with programs.client(8888, "lab", Authorization=f"Bearer {ADMIN_KEY}") as client:
        made = client.post("/api/kernels", params={"token": LAB_TOKEN}, json={"name": "python3"})
        assert made.status_code == 201, made.text
        channels = f"ws://{host}/api/kernels/{made.json()['id']}/channels?token={LAB_TOKEN}"
        with programs.websocket(channels, origin=f"http://{host}") as stream:
            assert executed(stream, "6*7") == "42"
        kernel = f"/api/kernels/{made.json()['id']}"
        assert client.delete(kernel, params={"token": LAB_TOKEN}).status_code == 204


def test_a_browser_works_with_the_cookies_of_jupyter_and_of_the_proxy(
    programs: Programs, tmp_path: Path
) -> None:
    """The link sets the proxy's cookie; Jupyter's page sets Jupyter's, among them that against XSRF."""
    host, jar = programs.host(8888, "lab"), tmp_path / "jar"
    made = programs.admin.post(f"/v1/instances/{programs.lab['id']}/ports/8888/links", json={"ttl_s": 60})
    link = f"http://{host}/?{urlsplit(made.json()['url']).query}"
    cookies = ("--cookie", str(jar), "--cookie-jar", str(jar))
    opened = programs.curl("--location", *cookies, f"{link}&token={LAB_TOKEN}")
    assert b"<title>JupyterLab</title>" in opened.stdout, opened
    again = programs.curl("--include", *cookies, f"http://{host}/lab")
    assert again.stdout.startswith(b"HTTP/1.1 200 "), again
    script = re.search(rb'src="(/static/lab/main\.[^"]+)"', again.stdout)
    assert script is not None, again
    assert len(programs.curl(*cookies, f"http://{host}{script[1].decode()}").stdout) > 10_000
    kernels = f"http://{host}/api/kernels"
    post = (*cookies, "--include", "--json", '{"name": "python3"}', kernels)
    refused = programs.curl(*post)
    assert refused.stdout.startswith(b"HTTP/1.1 403 "), refused
    assert b"_xsrf" in refused.stdout
    xsrf = re.search(r"\t_xsrf\t(.+)", jar.read_text())
    assert xsrf is not None
    answer = programs.curl("--header", f"X-XSRFToken: {xsrf[1]}", *post)
    assert answer.stdout.startswith(b"HTTP/1.1 201 "), answer
    kernel = json.loads(answer.stdout.partition(b"\r\n\r\n")[2])["id"]
    lines = [line.removeprefix("#HttpOnly_").split("\t") for line in jar.read_text().splitlines()]
    sent = "; ".join(f"{line[5]}={line[6]}" for line in lines if len(line) == 7)
    channels = f"ws://{host}/api/kernels/{kernel}/channels"
    with programs.websocket(channels, additional_headers={"Cookie": sent}, origin=f"http://{host}") as stream:
        assert executed(stream, "6*7") == "42"


def test_jupyter_never_gets_a_credential_of_the_proxy(programs: Programs) -> None:
    """After what the tests above have sent: keys, links and cookies."""
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with programs.client(8888, "lab", Cookie="mooring-port=x; own=kept", **key) as client:
        assert client.get("/api/status", params={"token": LAB_TOKEN}).status_code == 200
    logs = f"/v1/instances/{programs.lab['id']}/logs"
    wait_until(lambda: "'own=kept'" in programs.admin.get(logs).text, WITHIN_S)
    printed = programs.admin.get(logs).text
    for secret in (ADMIN_KEY, "mooring-port", port_links.PARAMETER):
        assert secret not in printed, printed


def test_without_a_domain_the_page_loads_and_its_scripts_do_not(
    programs: Programs, workspace: Workspace, root_address: str, tmp_path: Path
) -> None:
    """Jupyter's links are absolute. Its API and kernels work for programs."""
    environment = programs.cluster.server.environment
    with running_gateway(environment, workspace, tmp_path, root_address, proxy=True) as gateway:
        base = f"http://{root_address}:{gateway.proxy_port}"
        prefix = f"/p/{programs.lab['id']}/8888"
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=base, headers=headers, timeout=WITHIN_S, verify=False) as client:
            page = client.get(f"{prefix}/?token={LAB_TOKEN}", follow_redirects=True)
            assert page.url.path == f"{prefix}/lab"
            assert "<title>JupyterLab</title>" in page.text
            script = re.search(r'src="(/static/lab/main\.[^"]+)"', page.text)
            assert script is not None
            assert client.get(script[1]).status_code == 404
            assert client.get(f"{prefix}{script[1]}").status_code == 200
            made = client.post(f"{prefix}/api/kernels?token={LAB_TOKEN}", json={"name": "python3"})
            assert made.status_code == 201, made.text


# curl


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_gets_a_request_through_with_what_the_proxy_adds(
    programs: Programs, url: str, version: str
) -> None:
    done = programs.curl(version, "--header", KEY, "--user-agent", "curl", f"{url}/request?a=%2F&b=+")
    seen = json.loads(done.stdout)
    host = programs.host(8000, "tornado")
    assert seen["uri"] == "/request?a=%2F&b=+"
    assert sorted(map(tuple, seen["fields"])) == [
        ("Accept", "*/*"),
        ("Host", host),
        ("User-Agent", "curl"),
        ("X-Forwarded-For", programs.gateway.host),
        ("X-Forwarded-Host", host),
        ("X-Forwarded-Proto", "http"),
    ]


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("expect", ["Expect:", "Expect: 100-continue"])
def test_curl_uploads(programs: Programs, url: str, framing: str, expect: str) -> None:
    content = large()
    more = ("--header", "Transfer-Encoding: chunked") if framing == "chunked" else ()
    done = programs.curl(
        "--verbose", "--header", KEY, "--header", expect, "--header", "Content-Type: x/y", *more,
        "--data-binary", "@-", f"{url}/upload", given=content,
    )  # fmt: skip
    assert done.stdout.decode() == f"{framing} {LARGE_BYTES} {hashlib.sha256(content).hexdigest()}"
    assert status_lines(done.stderr) == ([100, 200] if "100" in expect else [200])


def test_curl_streams_an_upload_of_unknown_length(programs: Programs, url: str) -> None:
    content = large()
    done = programs.curl("--header", KEY, "--upload-file", "-", f"{url}/upload", given=content)
    assert done.stdout.decode() == f"chunked {LARGE_BYTES} {hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_downloads_and_resumes(programs: Programs, url: str, version: str, tmp_path: Path) -> None:
    at, content = tmp_path / "large", large()
    get = (version, "--header", KEY, f"{url}/files/large")
    assert programs.curl(*get, "--output", str(at)).returncode == 0
    assert at.read_bytes() == content
    assert programs.curl(*get, "--range", "1000-1999").stdout == content[1000:2000]
    at.write_bytes(content[:-MIB])
    assert programs.curl(*get, "--continue-at", "-", "--output", str(at)).returncode == 0
    assert at.read_bytes() == content
    head = programs.curl(*get, "--head").stdout.lower()
    assert b"content-length: %d\r\n" % LARGE_BYTES in head
    assert b"accept-ranges: bytes\r\n" in head


def test_curl_gets_compressed_answers(programs: Programs, url: str) -> None:
    get = ("--header", KEY, "--include", "--compressed", f"{url}/files/text.txt")
    head, _, body = programs.curl(*get).stdout.partition(b"\r\n\r\n")
    assert b"content-encoding: gzip" in head.lower()
    assert body == b"the same line\n" * 1000


def test_curl_reads_events_at_once(programs: Programs, url: str) -> None:
    done = programs.curl("--no-buffer", "--max-time", "1", "--header", KEY, f"{url}/events")
    assert done.returncode == 28, done  # the time is over
    assert done.stdout == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"


@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_curl_follows_redirects_of_the_program(programs: Programs, url: str, kind: str) -> None:
    done = programs.curl(
        "--location", "--header", KEY, "--write-out", "\n%{url_effective}", f"{url}/redirect/{kind}"
    )
    assert done.stdout.splitlines()[-1].decode() == f"{url}/request?redirected"
    assert json.loads(done.stdout.splitlines()[0])["uri"] == "/request?redirected"


def test_curl_reuses_its_connection(programs: Programs, url: str) -> None:
    get = ("--verbose", "--header", KEY, f"{url}/request")
    done = programs.curl(
        *get, "--next", *get, "--head", "--next", *get, "--request", "OPTIONS", "--next", *get
    )
    assert status_lines(done.stderr) == [200, 200, 405, 200]
    assert done.stderr.count(b"Re-using existing connection") == 3


def test_curl_reports_an_answer_that_the_program_cuts(programs: Programs) -> None:
    url = f"http://{programs.host(8001, 'tornado')}"
    for version in ("--http1.1", "--http1.0") * 3:
        done = programs.curl(version, "--header", KEY, f"{url}/")
        assert done.returncode == 56, done  # the connection was reset
        assert b"half an answer".startswith(done.stdout)


# websockets


def test_large_messages_pings_and_subprotocols_pass(programs: Programs) -> None:
    echo = f"ws://{programs.host(8000, 'tornado')}/echo"
    content = large()[:MIB]
    with programs.websocket(echo, subprotocols=["one", "two"]) as stream:
        assert stream.subprotocol == "two"
        for message in (content, "ü" * (MIB // 2), b"", ""):
            stream.send(message)
            assert stream.recv(timeout=WITHIN_S) == message
        assert stream.ping().wait(WITHIN_S)
        stream.send("ping me")
        assert stream.recv(timeout=WITHIN_S) == b"pong: from the program"


def test_an_asynchronous_client_sends_and_receives_at_the_same_time(programs: Programs) -> None:
    echo, content = f"ws://{programs.host(8000, 'tornado')}/echo", large()[:MIB]

    async def talk() -> list[str | bytes]:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        connection = websockets.asyncio.client.connect(
            echo, sock=programs.socket(), additional_headers=headers, proxy=None
        )
        async with asyncio.timeout(WITHIN_S), connection as stream, asyncio.TaskGroup() as tasks:
            for _ in range(16):
                tasks.create_task(stream.send(content))
            return [await stream.recv() for _ in range(16)]

    assert asyncio.run(talk()) == [content] * 16


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4999])
def test_close_codes_pass_both_ways(programs: Programs, code: int) -> None:
    echo = f"ws://{programs.host(8000, 'tornado')}/echo"
    with programs.websocket(echo) as stream:
        stream.send(f"close {code}")
        with pytest.raises(ConnectionClosed):
            stream.recv(timeout=WITHIN_S)
        assert (stream.close_code, stream.close_reason) == (code, "as asked")
    with programs.client(8000, "tornado", Authorization=f"Bearer {ADMIN_KEY}") as client:
        path = "/files/closed"
        before = client.get(path).text.count(f"{code}\n")
        with programs.websocket(echo) as stream:
            stream.close(code, "as the client likes")
        wait_until(lambda: client.get(path).text.count(f"{code}\n") == before + 1, WITHIN_S)


def test_killed_clients_leave_nothing(programs: Programs) -> None:
    """They are killed while they send messages, or read an answer."""
    [agent] = programs.cluster.agents
    processes = (programs.gateway.pid, agent.pid)
    # Connections that were kept for the next request have ended by then.
    wait_until(lambda: not programs.open_streams(), WITHIN_S)
    before = {pid: sockets_of(pid) for pid in processes}
    host = programs.host(8000, "tornado")
    arguments = [f"ws://{host}/echo", programs.gateway.host, str(programs.gateway.proxy_port), ADMIN_KEY]
    argv = [sys.executable, "-c", SENDING_CLIENT, *arguments]
    clients = [subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(4)]
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == b"%d\n" % MIB
    slow = ["curl", "--silent", "--limit-rate", "10k", "--noproxy", "*", "--header", KEY]
    address = f"http://{programs.gateway.host}:{programs.gateway.proxy_port}/files/large"
    clients.append(subprocess.Popen([*slow, "--header", f"Host: {host}", address], stdout=subprocess.DEVNULL))
    wait_until(lambda: programs.open_streams() == len(clients), WITHIN_S)
    for client in clients:
        client.kill()
        client.communicate()
    wait_until(lambda: not programs.open_streams(), WITHIN_S)
    for pid in processes:
        wait_until(lambda pid=pid: sockets_of(pid) <= before[pid], WITHIN_S)  # type: ignore[misc]
