"""Faults during a stream, with real processes and containers: nothing is left, and the container goes on."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from mooring_client.stream_messages import SUBPROTOCOL, Channel, message
from tests.nodes import websocket
from tests.service import ADMIN_KEY, Client
from tests.testbed.waiting import wait_until
from tests.walk.checker import Found
from tests.walk.conftest import Cluster
from tests.walk.test_operations import SMALL

MIB = 1024 * 1024
# A client in a process of its own, which reads nothing after the first message.
CLIENT = """
import sys, time
from tests.nodes import websocket
with websocket(sys.argv[1], sys.argv[2], *sys.argv[3].split(",")) as stream:
    print(stream.recv(), flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def instance(admin: Client, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """A running instance, whose container must be the same after the test."""
    made = admin.create(name="streams", gpus={"count": 1}, command=["sleep", "100000"], **SMALL)
    running = admin.wait(made["id"], "running")
    before = cluster.container(running)
    yield running
    cluster.restore()
    wait_until(lambda: admin.instance(made["id"])["state"] == "running", 60)
    assert cluster.container(running) == before


def url_of(cluster: Cluster, instance: dict[str, Any], path: str, *query: tuple[str, str]) -> str:
    base = cluster.server.url.replace("http", "ws", 1)
    return f"{base}/v1/instances/{instance['id']}/{path}?{urlencode(query)}"


def shell(cluster: Cluster, instance: dict[str, Any], script: str) -> ClientConnection:
    command = [("command", "sh"), ("command", "-c"), ("command", script), ("stdin", "true")]
    return websocket(url_of(cluster, instance, "exec/stream", *command), f"Bearer {ADMIN_KEY}", SUBPROTOCOL)


def commands_in(container: Found, argument: str) -> list[psutil.Process]:
    """The processes of a container that have this argument."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if argument not in (process.info["cmdline"] or []):
            continue
        try:
            if container.id in Path(f"/proc/{process.pid}/cgroup").read_text():
                found.append(process)
        except OSError:
            continue  # it has ended
    return found


def connections_of(pid: int) -> int:
    return len(psutil.Process(pid).net_connections("all"))


def threads_of(pid: int) -> int:
    return psutil.Process(pid).num_threads()


def status_of(stream: ClientConnection) -> dict[str, Any]:
    """Read to the end. Returns the status."""
    last = b""
    with pytest.raises(ConnectionClosed):
        while True:
            last = stream.recv(timeout=60, decode=False)
    assert last[:1] == bytes([Channel.STATUS]), last[:100]
    return dict(json.loads(last[1:]))


def test_a_killed_agent_ends_the_stream_with_a_message(cluster: Cluster, instance: dict[str, Any]) -> None:
    with shell(cluster, instance, "echo up; sleep 3331") as stream:
        assert stream.recv(timeout=20) == b"\x01up\n"
        cluster.agent_of(instance).kill()
        assert status_of(stream)["reason"]["code"] == "node_timeout"
    container = cluster.container(instance)
    others = cluster.agent_of(instance).node.client.containers.get(container.id)
    others.exec_run(["sleep", "4441"], detach=True)  # by an operator
    wait_until(lambda: commands_in(container, "4441"), 20)
    assert commands_in(container, "3331")
    cluster.agent_of(instance).start()
    wait_until(lambda: not commands_in(container, "3331"), 60)
    assert commands_in(container, "4441")


def test_a_frozen_agent_ends_the_stream_with_a_message(cluster: Cluster, instance: dict[str, Any]) -> None:
    with shell(cluster, instance, "echo up; sleep 3332") as stream:
        assert stream.recv(timeout=20) == b"\x01up\n"
        cluster.agent_of(instance).freeze()
        assert status_of(stream)["reason"]["code"] == "node_timeout"
    cluster.agent_of(instance).thaw()
    # The user is gone, so the command is killed.
    wait_until(lambda: not commands_in(cluster.container(instance), "3332"), 30)


def test_a_stopped_agent_kills_the_commands_that_it_started(
    cluster: Cluster, instance: dict[str, Any]
) -> None:
    with shell(cluster, instance, "echo up; sleep 3333") as stream:
        assert stream.recv(timeout=20) == b"\x01up\n"
        assert cluster.agent_of(instance).stop(signal.SIGTERM) == 0
        assert status_of(stream)["reason"]["code"] == "node_timeout"
    # A process that got SIGKILL needs the processor once more to end.
    wait_until(lambda: not commands_in(cluster.container(instance), "3333"), 30)


def test_a_killed_server_ends_the_command(cluster: Cluster, instance: dict[str, Any]) -> None:
    with shell(cluster, instance, "echo up; sleep 3334") as stream:
        assert stream.recv(timeout=20) == b"\x01up\n"
        cluster.server.kill()
        with pytest.raises(ConnectionClosed):
            stream.recv(timeout=20)
    wait_until(lambda: not commands_in(cluster.container(instance), "3334"), 30)


def test_a_stopped_server_ends_the_stream_with_a_message(cluster: Cluster, instance: dict[str, Any]) -> None:
    with shell(cluster, instance, "echo up; sleep 3335") as stream:
        assert stream.recv(timeout=20) == b"\x01up\n"
        assert cluster.server.stop(signal.SIGTERM) == 0
        assert status_of(stream)["reason"]["code"] == "server_ending"
    wait_until(lambda: not commands_in(cluster.container(instance), "3335"), 30)


@pytest.mark.parametrize("kind", ["idle", "flood", "port"])
def test_a_killed_client_leaves_nothing(cluster: Cluster, instance: dict[str, Any], kind: str) -> None:
    container, agent, server = cluster.container(instance), cluster.agent_of(instance), cluster.server
    script = {
        "idle": "echo up; sleep 3336",
        "flood": "echo up; exec /bin/yes 3336",
        "port": "echo up; nc -l -p 8888 -e /bin/yes 3336",
    }[kind]
    exec_url = url_of(
        cluster, instance, "exec/stream", ("command", "sh"), ("command", "-c"), ("command", script)
    )
    before = {each.pid: (connections_of(each.pid), threads_of(each.pid)) for each in (agent, server)}
    clients = [run_client(exec_url, SUBPROTOCOL)]
    wait_until(lambda: commands_in(container, "3336"), 20)
    if kind == "port":
        clients.append(run_client(url_of(cluster, instance, "ports/8888/stream"), "tcp"))
    for client in clients:
        client.kill()
        client.wait()
    wait_until(lambda: not commands_in(container, "3336"), 30)
    for pid, (connections, threads) in before.items():
        # A few threads of pools may have started meanwhile; none is a stream's.
        wait_until(lambda pid=pid, most=connections: connections_of(pid) <= most, 30)  # type: ignore[misc]
        assert threads_of(pid) <= threads + 8


def run_client(url: str, subprotocol: str) -> subprocess.Popen[bytes]:
    """Start a client, and wait until its stream is open."""
    arguments = [url, f"Bearer {ADMIN_KEY}", subprotocol]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline()
    client.stdout.close()
    return client


def test_a_gibibyte_for_a_reader_that_stops_needs_no_memory(
    cluster: Cluster, instance: dict[str, Any]
) -> None:
    agent, server = cluster.agent_of(instance), cluster.server
    container = cluster.container(instance)
    memory = {each.pid: psutil.Process(each.pid).memory_info().rss for each in (agent, server)}
    with shell(cluster, instance, "exec /bin/dd if=/dev/zero bs=1M count=1024") as stream:
        stream.recv(timeout=20)
        # The program waits: what it has written does not change any more.
        [dd] = wait_until(lambda: commands_in(container, "/bin/dd"), 20)
        written: list[int] = []

        def is_stopped() -> bool:
            written.append(_written(dd))
            return written[-4:] == [written[-1]] * 4

        wait_until(is_stopped, 60, 0.5)
        assert written[-1] < 64 * MIB
        for pid, before in memory.items():
            assert psutil.Process(pid).memory_info().rss - before < 48 * MIB
        stream.socket.close()
    wait_until(lambda: not commands_in(container, "/bin/dd"), 30)


def _written(process: psutil.Process) -> int:
    return int(process.io_counters().write_chars)


def test_a_reader_that_reads_gets_every_byte(cluster: Cluster, instance: dict[str, Any]) -> None:
    with shell(cluster, instance, "head -c 268435456 /dev/zero | tr '\\0' x") as stream:
        received = 0
        while (found := stream.recv(timeout=60, decode=False))[:1] == bytes([Channel.STDOUT]):
            assert found.count(b"x") == len(found) - 1
            received += len(found) - 1
    assert (received, json.loads(found[1:])["exit_code"]) == (256 * MIB, 0)


def test_input_passes_whole_to_a_slow_program(cluster: Cluster, instance: dict[str, Any]) -> None:
    with shell(cluster, instance, "sleep 2; wc -c") as stream:
        for _ in range(256):
            stream.send(message(Channel.STDIN, bytes(64 * 1024)))
        stream.send(bytes([Channel.CLOSE, Channel.STDIN]))
        assert stream.recv(timeout=60) == b"\x01%d\n" % (16 * MIB)
        assert status_of(stream)["exit_code"] == 0
