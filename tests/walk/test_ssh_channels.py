"""Channels of one SSH connection, as multiplexing clients and SSH libraries use them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncssh
import psutil
import pytest

from mooring.gateway.ssh.windows import SMALL_WINDOW
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.walk.conftest import Cluster
from tests.walk.ssh_client import WITHIN_S, SshClient
from tests.walk.test_operations import SMALL
from tests.walk.test_stream_faults import commands_in

MIB = 1024 * 1024
# More than all buffers between the client and a program take.
MANY = 64 * MIB
STUCK_SAMPLES = 10
# Busybox has no other way to wait for a connection.
ACCEPTED = "while ! grep -q :1F9A /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done"


@pytest.fixture
def instance(admin: Client) -> dict[str, Any]:
    made = admin.create(name="box", gpus={"count": 1}, command=["sleep", "100000"], **SMALL)
    return admin.wait(made["id"], "running")


@asynccontextmanager
async def connected(ssh: SshClient) -> AsyncIterator[asyncssh.SSHClientConnection]:
    async with asyncssh.connect(
        ssh.gateway.host, ssh.gateway.ssh_port, username="box", client_keys=[str(ssh.key)], known_hosts=None,
        config=None,
    ) as connection:  # fmt: skip
        yield connection


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition, WITHIN_S)


async def fill(*channels: Any) -> int:
    """Send zeros to programs that do not read, until nothing more is taken. Returns how many were sent."""
    size = MANY // len(channels)
    for channel in channels:
        channel.write(bytes(size))
    left: list[int] = []
    transport = channels[0].get_connection()._transport

    def is_stuck() -> bool:
        left.append(sum(channel.get_write_buffer_size() for channel in channels))
        is_same = len(left) > STUCK_SAMPLES and left[-1] == left[-STUCK_SAMPLES]
        return left[-1] < MANY and is_same and not transport.get_write_buffer_size()

    await asyncio.to_thread(wait_until, is_stuck, WITHIN_S, 0.1)
    return MANY - left[-1]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * WITHIN_S):
            await work()

    asyncio.run(limited())


async def output_of(connection: asyncssh.SSHClientConnection, command: str) -> str:
    return str((await connection.run(command, check=True)).stdout)


def test_a_closed_channel_ends_its_command_even_if_that_reads_nothing(
    ssh: SshClient, cluster: Cluster, instance: dict[str, Any]
) -> None:
    container = cluster.container(instance)

    async def work() -> None:
        async with connected(ssh) as connection:
            process = await connection.create_process("sleep 6661", encoding=None)
            await until(lambda: commands_in(container, "6661"))
            await fill(process.channel)
            process.channel.abort()
            await until(lambda: not commands_in(container, "6661"))
            assert await output_of(connection, "echo on") == "on\n"

    run(work)


@pytest.mark.parametrize("end", ["the programs end", "the connection is lost"])
def test_input_that_waits_is_dropped_with_its_channel(
    ssh: SshClient, instance: dict[str, Any], end: str
) -> None:
    process, used = psutil.Process(ssh.gateway.pid), []

    async def fill_and_end() -> None:
        async with connected(ssh) as connection, connected(ssh) as other:
            waiting = "while ! [ -e /tmp/end ]; do sleep 0.5; done"
            programs = [await connection.create_process(waiting, encoding=None) for _ in range(4)]
            await fill(*(each.channel for each in programs))
            if end == "the programs end":
                await other.run("touch /tmp/end", check=True)
                for each in programs:
                    await each.wait()
                await other.run("rm /tmp/end", check=True)
            else:
                connection.abort()
        samples: list[int] = []

        def is_same() -> bool:
            samples.append(process.memory_info().rss)
            return len(samples) > STUCK_SAMPLES and abs(samples[-1] - samples[-STUCK_SAMPLES]) < MIB

        await until(is_same)
        used.append(samples[-1])

    for _ in range(8):
        run(fill_and_end)
    assert used[-1] < used[1] + 24 * MIB


def test_signals_that_wait_behind_input_all_arrive(
    ssh: SshClient, cluster: Cluster, instance: dict[str, Any]
) -> None:
    traps = "trap 'echo one' USR1; trap 'echo two' USR2; trap 'echo three' HUP"
    # The signals are for the whole process group, and the shell handles them between its commands.
    read = f"(trap '' USR1 USR2 HUP; exec head -c {MANY})"
    command = f"{traps}; echo ready; while ! [ -e /tmp/read ]; do sleep 0.1; done; {read}; sleep 1; read x"

    async def work() -> None:
        async with connected(ssh) as connection:
            process = await connection.create_process(command, encoding=None)
            assert await process.stdout.readline() == b"ready\n"
            await fill(process.channel)
            for name in ("USR1", "USR2", "HUP"):
                process.send_signal(name)
            await output_of(connection, "touch /tmp/read")
            await process.stdout.readexactly(MANY)
            assert {await process.stdout.readline() for _ in range(3)} == {b"one\n", b"two\n", b"three\n"}

    run(work)


def test_an_upload_gets_a_large_window(ssh: SshClient, instance: dict[str, Any]) -> None:
    async def work() -> None:
        async with connected(ssh) as connection:
            process = await connection.create_process("cat > /dev/null", encoding=None)
            assert process.channel._send_window == SMALL_WINDOW
            process.stdin.write(bytes(8 * MIB))
            await process.stdin.drain()
            await until(lambda: process.channel._send_window >= MIB)
            await connection.create_process("nc -l -p 8090 -e cat", encoding=None)
            await connection.run(ACCEPTED, check=True)
            _reader, writer = await connection.open_connection("localhost", 8090, encoding=None)
            assert writer.channel._send_window == SMALL_WINDOW

    run(work)


@pytest.mark.parametrize("end", ["close", "close and disconnect", "close and drop"])
def test_a_forwarded_connection_delivers_what_was_sent_before_it_was_closed(
    ssh: SshClient, instance: dict[str, Any], end: str
) -> None:
    async def work() -> None:
        async with connected(ssh) as connection, connected(ssh) as other:
            counted = "wc -c > /tmp/size; mv /tmp/size /tmp/received"
            program = f"while ! [ -e /tmp/read ]; do sleep 0.1; done; {counted}"
            await other.create_process(f"nc -l -p 8090 -e sh -c '{program}'")
            await other.run(ACCEPTED, check=True)
            _reader, writer = await connection.open_connection("localhost", 8090, encoding=None)
            waiting = (
                "read x; touch /tmp/read; while ! [ -e /tmp/received ]; do sleep 0.1; done; cat /tmp/received"
            )
            reader = await other.create_process(waiting)
            sent = await fill(writer.channel)
            writer.channel.abort()
            if end == "close and disconnect":
                connection.close()
            elif end == "close and drop":
                connection.abort()
            reader.stdin.write("\n")
            assert await reader.stdout.readline() == f"{sent}\n"

    run(work)
