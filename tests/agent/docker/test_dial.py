"""Connections to ports inside real containers, and to nothing else."""

import asyncio
import re
import socket
from contextlib import AbstractAsyncContextManager

import pytest

from mooring.agent.docker.runtime import DockerRuntime
from mooring.agent.runtime import Container, ContainerStream, StreamRefused
from mooring.schemas.agent_streams import DialRequest
from mooring_client.stream_messages import MAX_DATA_BYTES, Channel
from tests.agent.container_streams import opened, read_all, run, with_late_input, within
from tests.agent.docker_assignments import PortsTaken, assignment, start
from tests.testbed import images
from tests.testbed.dockerd import DockerNode
from tests.testbed.waiting import wait_until

MIB = 1024 * 1024
CLOSED = (Channel.CLOSE, bytes([Channel.STDOUT]))


def connection(
    runtime: DockerRuntime, container: Container, port: int
) -> AbstractAsyncContextManager[ContainerStream]:
    return opened(runtime.dial(container.container_id, DialRequest(port=port)))


def listening(runtime: DockerRuntime, script: str, port: int) -> Container:
    """A container whose program listens on this port."""
    container = start(runtime, assignment(command=["sh", "-c", script]))
    listens = re.compile(f":{port:04X} 0+:0000 0A".encode())
    sockets = ("cat", "/proc/net/tcp", "/proc/net/tcp6")
    wait_until(lambda: listens.search(run(runtime, container, *sockets).stdout))
    return container


def refusal_of(runtime: DockerRuntime, container: Container, port: int) -> str:
    async def connect() -> None:
        async with connection(runtime, container, port):
            raise AssertionError

    with pytest.raises(StreamRefused) as refused:
        within(connect())
    assert refused.value.status.reason is not None
    return refused.value.status.reason.code


def test_bytes_pass_in_both_directions_and_each_direction_ends_by_itself(runtime: DockerRuntime) -> None:
    container = listening(runtime, "nc -l -p 8888 -e cat", 8888)

    async def talk() -> None:
        async with connection(runtime, container, 8888) as stream:
            await stream.write(b"one\xff\0")
            assert await stream.read() == (Channel.STDOUT, b"one\xff\0")
            await stream.write(b"two")
            assert await stream.read() == (Channel.STDOUT, b"two")
            await stream.end_input()
            ran = await read_all(stream)
            assert ran.messages == [CLOSED]
            assert ran.status.reason is None

    within(talk())


@pytest.mark.parametrize("address", ["127.0.0.1", "$(hostname -i)"])
def test_a_program_that_listens_on_one_address_of_the_container_is_reached(
    runtime: DockerRuntime, address: str
) -> None:
    container = listening(runtime, f"httpd -f -p {address}:8888 -h /", 8888)

    async def get() -> bytes:
        async with connection(runtime, container, 8888) as stream:
            await stream.write(b"GET /etc/hostname HTTP/1.0\r\n\r\n")
            await stream.end_input()
            return (await read_all(stream)).stdout

    name = run(runtime, container, "hostname").stdout
    assert within(get()).endswith(b"\r\n\r\n" + name)


def test_the_programs_end_leaves_the_other_direction_open(runtime: DockerRuntime) -> None:
    container = listening(runtime, "echo greeting | nc -l -p 8888 > /tmp/received; sleep 1000", 8888)

    async def talk() -> None:
        async with connection(runtime, container, 8888) as stream:
            assert await stream.read() == (Channel.STDOUT, b"greeting\n")
            await stream.write(b"late")
            await stream.end_input()

    within(talk())
    wait_until(lambda: run(runtime, container, "cat", "/tmp/received").stdout == b"late")


def test_a_port_without_a_listener_is_refused(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    assert refusal_of(runtime, container, 8888) == "port_not_listening"


def test_a_port_of_the_agents_machine_is_not_reached(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert refusal_of(runtime, container, listener.getsockname()[1]) == "port_not_listening"


def test_a_port_in_the_network_of_the_engine_is_not_reached(node: DockerNode, runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    with PortsTaken(node, 8877, 8877):
        assert refusal_of(runtime, container, 8877) == "port_not_listening"


def test_a_port_of_another_container_is_not_reached(runtime: DockerRuntime) -> None:
    listening(runtime, "nc -l -p 8899 -e cat", 8899)
    container = start(runtime, assignment())
    assert refusal_of(runtime, container, 8899) == "port_not_listening"


def test_a_container_in_the_nodes_network_is_refused(node: DockerNode, runtime: DockerRuntime) -> None:
    """It would reach every port of the node."""
    created = node.client.containers.run(images.BUSYBOX, ["sleep", "1000"], network_mode="host", detach=True)
    try:
        with pytest.raises(StreamRefused) as refused:
            within(runtime.dial(str(created.id), DialRequest(port=80)))
        reason = refused.value.status.reason
        assert reason is not None
        assert (reason.code, "node's own network" in reason.message) == ("not_supported", True)
    finally:
        created.kill()


def test_a_container_in_the_network_of_another_is_refused(node: DockerNode, runtime: DockerRuntime) -> None:
    other = listening(runtime, "nc -l -p 8899 -e cat", 8899)
    created = node.client.containers.run(
        images.BUSYBOX, ["sleep", "1000"], network_mode=f"container:{other.container_id}", detach=True
    )
    try:
        with pytest.raises(StreamRefused) as refused:
            within(runtime.dial(str(created.id), DialRequest(port=8899)))
        assert refused.value.status.reason is not None
        assert refused.value.status.reason.code == "not_supported"
    finally:
        created.kill()


def test_a_container_that_does_not_run_is_refused(runtime: DockerRuntime) -> None:
    container = start(runtime, assignment())
    runtime.kill(container)
    assert refusal_of(runtime, container, 80) == "not_running"
    runtime.remove(container)
    assert refusal_of(runtime, container, 80) == "not_running"


def test_a_port_of_a_container_without_a_network_is_reached(node: DockerNode, runtime: DockerRuntime) -> None:
    created = node.client.containers.run(
        images.BUSYBOX, ["nc", "-l", "-p", "8888", "-e", "cat"], network_mode="none", detach=True
    )

    async def talk() -> None:
        async with opened(await_port(runtime, str(created.id), 8888)) as stream:
            await stream.write(b"hello")
            assert await stream.read() == (Channel.STDOUT, b"hello")

    within(talk())


async def await_port(runtime: DockerRuntime, container_id: str, port: int) -> ContainerStream:
    """Connect when the program listens, which accepts only one connection."""
    while True:
        try:
            return await runtime.dial(container_id, DialRequest(port=port))
        except StreamRefused as refused:
            assert refused.status.reason is not None
            assert refused.status.reason.code == "port_not_listening"


def test_a_program_that_reads_nothing_makes_its_writer_wait(runtime: DockerRuntime) -> None:
    container = listening(runtime, "nc -l -p 8888 -e sleep 1000", 8888)

    async def write() -> int:
        written = 0
        async with connection(runtime, container, 8888) as stream:
            try:
                async with asyncio.timeout(2):
                    while True:
                        await stream.write(bytes(MAX_DATA_BYTES))
                        written += MAX_DATA_BYTES
            except TimeoutError:
                return written

    assert within(write()) < 32 * MIB


def test_a_connection_that_the_program_resets_ends_in_both_directions(runtime: DockerRuntime) -> None:
    """The kernel resets a connection whose program ends without having read all data."""
    container = listening(runtime, "nc -l -p 8888 -e sleep 1000", 8888)

    async def talk() -> None:
        async with connection(runtime, container, 8888) as stream:
            await stream.write(b"unread")
            await asyncio.to_thread(runtime.kill, container)
            ran = await read_all(stream)
            assert ran.messages == []
            assert ran.status.reason is not None
            assert ran.status.reason.code == "connection_reset"
            await stream.write(b"late")
            await stream.end_input()

    within(talk())


def test_data_after_the_end_of_the_input_is_dropped(runtime: DockerRuntime) -> None:
    container = listening(runtime, "nc -l -p 8888 -e cat", 8888)

    async def talk() -> bytes:
        async with connection(runtime, container, 8888) as stream:
            return (await with_late_input(stream)).stdout

    assert within(talk()) == b"one"


def test_a_connection_ends_with_its_container(runtime: DockerRuntime) -> None:
    container = listening(runtime, "nc -l -p 8888 -e cat", 8888)

    async def talk() -> None:
        async with connection(runtime, container, 8888) as stream:
            await stream.write(b"hello")
            assert await stream.read() == (Channel.STDOUT, b"hello")
            await asyncio.to_thread(runtime.kill, container)
            assert await stream.read() == CLOSED

    within(talk())
