"""The port proxy to programs in real containers, whose node publishes no port."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.service import ADMIN_KEY, Client
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.conftest import Cluster
from tests.walk.product import GatewayProcess, running_gateway
from tests.walk.test_operations import SMALL
from tests.walk.test_stream_faults import commands_in

WITHIN_S = 20.0
# On 127.0.0.1 in the container: files, and a script that sends an event each tenth of a second.
SERVE = """
mkdir -p /tmp/www/cgi-bin
echo hello > /tmp/www/index.html
head -c 20000000 /dev/zero > /tmp/www/large
cat > /tmp/www/cgi-bin/events <<'END'
#!/bin/sh
printf 'Content-Type: text/event-stream\\r\\n\\r\\n'
while echo "data: $(date)"; do echo; sleep 0.1; done
END
chmod +x /tmp/www/cgi-bin/events
httpd -p 127.0.0.1:8080 -h /tmp/www
exec /bin/wait-for-term
"""


@pytest.fixture(scope="module")
def proxy(
    shared_cluster: Cluster, workspace: Workspace, root_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    environment, folder = shared_cluster.server.environment, tmp_path_factory.mktemp("gateway")
    environment = environment | {"MOORING_GATEWAY_DRAIN_S": "0.5", "MOORING_PROXY_DOMAIN": "apps.test"}
    with running_gateway(environment, workspace, folder, root_address, proxy=True) as gateway:
        yield gateway


@pytest.fixture
def instance(admin: Client) -> dict[str, Any]:
    made = admin.create(
        name="web", gpus={"count": 1}, command=["sh", "-c", SERVE],
        ports=[{"container": 8080, "expose": "proxy"}], **SMALL,
    )  # fmt: skip
    return admin.wait(made["id"], "running")


@pytest.fixture
def client(proxy: GatewayProcess, instance: dict[str, Any]) -> Iterator[httpx.Client]:
    headers = {"Host": "8080-web-default.apps.test", "Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"http://{proxy.host}:{proxy.proxy_port}"
    with httpx.Client(base_url=url, headers=headers, timeout=WITHIN_S, verify=False) as made:
        wait_until(lambda: made.get("/").status_code == 200, WITHIN_S)
        yield made


def test_a_program_on_loopback_is_reached_and_nothing_is_published(
    client: httpx.Client, cluster: Cluster, instance: dict[str, Any]
) -> None:
    assert client.get("/index.html").text == "hello\n"
    assert client.get("/large").content == bytes(20_000_000)
    assert client.get("/none").status_code == 404
    node = cluster.nodes[0]
    listed = node.client.api.containers(filters={"label": f"mooring.instance={instance['id']}"})
    assert not [port for each in listed for port in each["Ports"] if "PublicPort" in port]


def test_events_of_a_script_arrive_one_by_one(client: httpx.Client) -> None:
    with client.stream("GET", "/cgi-bin/events") as answer:
        lines = answer.iter_lines()
        assert len([line for line, _ in zip(lines, range(6), strict=False) if line.startswith("data: ")]) == 3


def test_a_killed_client_ends_its_script(
    client: httpx.Client, cluster: Cluster, instance: dict[str, Any]
) -> None:
    container = cluster.container(instance)
    with client.stream("GET", "/cgi-bin/events") as answer:
        next(answer.iter_raw())
        wait_until(lambda: commands_in(container, "events"), WITHIN_S)
    wait_until(lambda: not commands_in(container, "events"), WITHIN_S)


def test_a_killed_agent_ends_the_stream_and_the_next_one_serves(
    client: httpx.Client, cluster: Cluster, instance: dict[str, Any]
) -> None:
    agent = cluster.agent_of(instance)
    with client.stream("GET", "/cgi-bin/events") as answer:
        events = answer.iter_raw()
        next(events)
        agent.kill()
        began = time.monotonic()
        with pytest.raises(httpx.TransportError):
            for _event in events:
                assert time.monotonic() - began < WITHIN_S
    agent.start()
    wait_until(lambda: client.get("/").status_code == 200, 60)


def test_a_killed_gateway_ends_the_stream_and_not_the_container(
    client: httpx.Client, proxy: GatewayProcess, cluster: Cluster, instance: dict[str, Any]
) -> None:
    container = cluster.container(instance)
    with client.stream("GET", "/cgi-bin/events") as answer:
        events = answer.iter_raw()
        next(events)
        proxy.stop(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            for _event in events:
                continue
    proxy.start()
    assert client.get("/index.html").text == "hello\n"
    assert cluster.container(instance) == container


def test_a_stopped_instance_is_refused(client: httpx.Client, admin: Client, instance: dict[str, Any]) -> None:
    admin.post(f"/v1/instances/{instance['id']}/stop", json={"timeout_s": 0})
    admin.wait(instance["id"], "stopped")
    wait_until(lambda: client.get("/").status_code == 503, WITHIN_S)


def nc_instance(admin: Client, program: str) -> dict[str, Any]:
    """An instance whose port 9000 answers with a switch to WebSocket, and then with a program's output."""
    script = (
        "printf 'HTTP/1.1 101 S\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n' > /tmp/head; "
        f"printf '#!/bin/sh\\ncat /tmp/head; exec {program}\\n' > /tmp/run; chmod +x /tmp/run; "
        "exec nc -ll -p 9000 -e /tmp/run"
    )
    made = admin.create(name="ws", command=["sh", "-c", script], gpus={"count": 1}, **SMALL)
    return admin.wait(made["id"], "running")


@contextmanager
def upgraded(proxy: GatewayProcess) -> Iterator[socket.socket]:
    """A client of `nc_instance`."""
    request = (
        "GET / HTTP/1.1\r\nHost: 9000-ws-default.apps.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Authorization: Bearer {ADMIN_KEY}\r\n\r\n"
    )
    with socket.create_connection((proxy.host, proxy.proxy_port), timeout=WITHIN_S) as connection:
        connection.sendall(request.encode())
        yield connection


def test_a_websocket_passes(proxy: GatewayProcess, admin: Client) -> None:
    nc_instance(admin, "cat")

    def echoed() -> bytes:
        with upgraded(proxy) as connection:
            received = connection.recv(65536)
            connection.sendall(b"\x81\x05hello")
            while received.startswith(b"HTTP/1.1 101") and b"\x81\x05hello" not in received:
                received += connection.recv(65536)
            return received

    wait_until(lambda: echoed().endswith(b"\x81\x05hello"), WITHIN_S)


def test_a_killed_agent_resets_a_websocket_that_is_behind(
    proxy: GatewayProcess, cluster: Cluster, admin: Client
) -> None:
    """The client has not read all that arrived before: its end must not look like that of the messages."""
    agent = cluster.agent_of(nc_instance(admin, "cat /dev/zero"))

    def is_open() -> bool:
        with upgraded(proxy) as connection:
            return connection.recv(12) == b"HTTP/1.1 101"

    wait_until(is_open, WITHIN_S)
    with upgraded(proxy) as connection:
        connection.recv(12)
        agent.kill()
        with pytest.raises(ConnectionResetError):
            while connection.recv(1024):
                connection.send(b"x")
    agent.start()
