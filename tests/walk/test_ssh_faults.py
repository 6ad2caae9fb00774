"""Faults during SSH sessions, with real processes: nothing is left, and the container goes on."""

import asyncio
import operator
import subprocess
from typing import Any

import asyncssh
import psutil
import pytest

from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster
from tests.walk.product import GatewayProcess
from tests.walk.ssh_client import WITHIN_S, SshClient
from tests.walk.test_operations import SMALL
from tests.walk.test_stream_faults import commands_in, connections_of, threads_of

MIB = 1024 * 1024
STUCK_SAMPLES = 10
NEW_THREADS = 4


@pytest.fixture
def instance(admin: Client) -> dict[str, Any]:
    made = admin.create(name="box", gpus={"count": 1}, command=["sleep", "100000"], **SMALL)
    return admin.wait(made["id"], "running")


class Resources:
    """What the gateway and the agent of an instance have open.

    Their thread pools start threads when they need them, so a few more are no leak.
    """

    def __init__(self, gateway: GatewayProcess, agent_pid: int) -> None:
        self._pids = gateway.pid, agent_pid
        self._before = self._now()

    def _now(self) -> list[int]:
        return [*map(connections_of, self._pids), *map(threads_of, self._pids)]

    def has_more(self) -> bool:
        return self._now()[:2] > self._before[:2]

    def wait_until_as_before(self) -> None:
        """Wait until neither has more connections or threads than at first."""
        allowed = [*self._before[:2], *(count + NEW_THREADS for count in self._before[2:])]
        try:
            wait_until(lambda: all(map(operator.le, self._now(), allowed)), 60)
        except AssertionError:
            raise AssertionError(f"{self._now()} instead of {self._before}") from None


@pytest.fixture
def resources(
    ssh: SshClient, gateway: GatewayProcess, cluster: Cluster, instance: dict[str, Any]
) -> Resources:
    for _ in range(3):  # start the threads and connections that stay
        assert ssh.run("box", "true").returncode == 0
    return Resources(gateway, cluster.agent_of(instance).pid)


def kill(client: subprocess.Popen[bytes]) -> None:
    client.kill()
    client.communicate()


def test_a_killed_upload_leaves_nothing(
    ssh: SshClient, cluster: Cluster, instance: dict[str, Any], resources: Resources
) -> None:
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        argv = ssh.argv("box", "cat - 5551 > /dev/null")
        client = subprocess.Popen(argv, stdin=endless.stdout, stdout=subprocess.PIPE)
        container = cluster.container(instance)
        wait_until(lambda: commands_in(container, "5551"), WITHIN_S)
        kill(client)
        endless.kill()
    resources.wait_until_as_before()
    wait_until(lambda: not commands_in(container, "5551"), WITHIN_S)


def test_a_killed_download_leaves_nothing(
    ssh: SshClient, cluster: Cluster, instance: dict[str, Any], resources: Resources
) -> None:
    client = ssh.start("box", "cat /dev/zero")
    assert client.stdout is not None
    client.stdout.read(MIB)
    kill(client)
    resources.wait_until_as_before()
    wait_until(lambda: not commands_in(cluster.container(instance), "/dev/zero"), WITHIN_S)


def test_a_client_that_reads_nothing_fills_no_memory(
    ssh: SshClient, gateway: GatewayProcess, cluster: Cluster, instance: dict[str, Any], resources: Resources
) -> None:
    processes = [psutil.Process(pid) for pid in (gateway.pid, cluster.agent_of(instance).pid)]
    before = [process.memory_info().rss for process in processes]
    command = f"head -c {1024 * MIB} /dev/zero; true"
    client = ssh.start("box", command)
    assert client.stdout is not None
    client.stdout.read(MIB)
    progress = Progress(commands_in(cluster.container(instance), command))
    wait_until(progress.is_stuck, WITHIN_S, 0.1)
    for process, rss in zip(processes, before, strict=True):
        assert process.memory_info().rss < rss + 32 * MIB
    kill(client)
    resources.wait_until_as_before()


def test_a_fast_client_of_a_slow_program_fills_no_memory(
    ssh: SshClient, gateway: GatewayProcess, instance: dict[str, Any], resources: Resources
) -> None:
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    slow = "for i in $(seq 300); do head -c 131072 | wc -c; sleep 0.01; done"
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        argv = ssh.argv("box", slow)
        with subprocess.Popen(argv, stdin=endless.stdout, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            most = max(process.memory_info().rss for _line in client.stdout)
        endless.kill()
    assert most < before + 32 * MIB
    resources.wait_until_as_before()


def test_a_client_that_claims_a_huge_window_and_reads_nothing_fills_no_memory(
    ssh: SshClient, gateway: GatewayProcess, cluster: Cluster, instance: dict[str, Any], resources: Resources
) -> None:
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    command = f"head -c {1024 * MIB} /dev/zero; true"
    container = cluster.container(instance)

    async def claim() -> None:
        async with asyncssh.connect(
            gateway.host, gateway.ssh_port, username="box", client_keys=[str(ssh.key)], known_hosts=None,
            config=None,
        ) as connection:  # fmt: skip
            started = await connection.create_process(command, encoding=None, window=2**32 - 1)
            await started.stdout.read(1)
            assert connection._transport is not None
            connection._transport.pause_reading()  # asyncssh has no other way to read nothing
            progress = await asyncio.to_thread(lambda: Progress(commands_in(container, command)))
            await asyncio.to_thread(wait_until, progress.is_stuck, WITHIN_S, 0.1)
            assert process.memory_info().rss < before + 32 * MIB
            connection.abort()

    asyncio.run(claim())
    resources.wait_until_as_before()


class Progress:
    """Whether processes still write."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._samples: list[int] = []

    def is_stuck(self) -> bool:
        """Whether they have written nothing between the last calls."""
        self._samples.append(sum(process.io_counters().write_chars for process in self._processes))
        has_begun = self._samples[-1] > 2 * MIB
        is_same = len(self._samples) > STUCK_SAMPLES and self._samples[-STUCK_SAMPLES] == self._samples[-1]
        return has_begun and is_same


def test_a_killed_forwarding_leaves_nothing(ssh: SshClient, resources: Resources) -> None:
    ssh.run("box", "echo hello > /tmp/index.html; httpd -p 127.0.0.1:8080 -h /tmp")
    client = ssh.start("box", flags=("-W", "localhost:8080"))
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"GET /index.html HTTP/1.0\r\n")  # the program waits for the rest
    client.stdin.flush()
    wait_until(resources.has_more, WITHIN_S)
    kill(client)
    resources.wait_until_as_before()


def test_a_killed_agent_ends_the_session_with_a_message(
    ssh: SshClient, cluster: Cluster, instance: dict[str, Any]
) -> None:
    container = cluster.container(instance)
    client = ssh.start("box", "echo up; sleep 5552")
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    cluster.agent_of(instance).kill()
    _output, errors = client.communicate(timeout=WITHIN_S)
    assert client.returncode == 255
    assert b"mooring: the node closed the connection" in errors
    cluster.restore()
    wait_until(lambda: not commands_in(container, "5552"), 60)
    assert cluster.container(instance) == container


def test_a_stopped_instance_is_refused_with_its_state(
    ssh: SshClient, admin: Client, instance: dict[str, Any]
) -> None:
    admin.post(f"/v1/instances/{instance['id']}/stop", json={"timeout_s": 0})
    admin.wait(instance["id"], "stopped")
    done = ssh.run("box", "true")
    assert done.returncode == 255
    assert b"mooring: the instance is stopped, not running" in done.stderr


def test_a_deleted_instance_ends_its_sessions(
    ssh: SshClient, admin: Client, instance: dict[str, Any]
) -> None:
    client = ssh.start("box", "echo up; sleep 5553")
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    admin.delete(f"/v1/instances/{instance['id']}")
    _output, errors = client.communicate(timeout=WITHIN_S)
    assert client.returncode == 255
    assert b"mooring: the instance was deleted" in errors
