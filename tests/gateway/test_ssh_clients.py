"""Clients that do not behave: floods, silence and malformed input do not affect other clients."""

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import psutil
import pytest

from mooring.auth.rate_limits import FAILED_ATTEMPTS, REQUESTS, ActionClass
from mooring.gateway.open_connections import CONNECTIONS, UNAUTHENTICATED_PER_NETWORK
from mooring.gateway.ssh.connections import KEYS_OFFERED
from mooring.gateway.ssh.listener import LOGIN_S
from tests.gateway.conftest import HOST
from tests.service import Client
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import GatewayProcess, ServerProcess, running_gateway

# In a loop of 10,000 each they take two minutes: MOORING_TEST_CLIENTS=10000 pytest tests/gateway
CLIENTS = int(os.environ.get("MOORING_TEST_CLIENTS", "1000"))


@pytest.fixture
def key() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


async def answers(gateway: GatewayProcess, key: asyncssh.SSHKey, source: str = HOST) -> bool:
    """Whether the gateway answers a client at this address whose key is not registered."""
    try:
        async with asyncssh.connect(
            HOST, gateway.ssh_port, local_addr=(source, 0), username="x", client_keys=[key],
            known_hosts=None, config=None,
        ):  # fmt: skip
            return False
    except asyncssh.PermissionDenied:
        return True


def connect(gateway: GatewayProcess) -> socket.socket:
    return socket.create_connection((HOST, gateway.ssh_port), timeout=30)


def test_connections_that_say_nothing_are_limited_per_address(
    gateway: GatewayProcess, key: asyncssh.SSHKey
) -> None:
    with contextlib.ExitStack() as exits:
        silent = [exits.enter_context(connect(gateway)) for _ in range(UNAUTHENTICATED_PER_NETWORK + 5)]
        ended = [each for each in silent[UNAUTHENTICATED_PER_NETWORK:] if is_ended(each)]
        assert len(ended) == 5
    wait_until(lambda: asyncio.run(answers(gateway, key)), 60)


def is_ended(connection: socket.socket) -> bool:
    """Whether the gateway ends the connection, long before the time for a login has passed."""
    connection.settimeout(LOGIN_S / 2)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_flood_of_connections_leaves_nothing(gateway: GatewayProcess, key: asyncssh.SSHKey) -> None:
    process = psutil.Process(gateway.pid)
    assert asyncio.run(answers(gateway, key))  # opens files of the database, which stay open
    files, memory = process.num_fds(), process.memory_info().rss
    for _ in range(CLIENTS):
        with contextlib.suppress(OSError):
            connect(gateway).close()
    wait_until(lambda: asyncio.run(answers(gateway, key)), 60)
    wait_until(lambda: process.num_fds() <= files + 20, 60)
    assert process.memory_info().rss < memory + 100 * 1024 * 1024


def test_malformed_input_ends_only_its_connection(gateway: GatewayProcess, key: asyncssh.SSHKey) -> None:
    process = psutil.Process(gateway.pid)
    assert asyncio.run(answers(gateway, key))
    files, rng = process.num_fds(), random.Random(12)
    for _ in range(CLIENTS):
        with contextlib.suppress(OSError), connect(gateway) as connection:
            connection.sendall(malformed(rng))
    wait_until(lambda: asyncio.run(answers(gateway, key)), 60)
    wait_until(lambda: process.num_fds() <= files + 20, 60)
    assert gateway.running
    assert "Traceback" not in gateway.printed(), gateway.tail()


def malformed(rng: random.Random) -> bytes:
    """The begin of a connection, with random bytes, lengths and message numbers."""
    version = rng.choice([b"SSH-2.0-x\r\n", b"SSH-1.5-x\n", b"GET / HTTP/1.1\r\n\r\n", b"", b"\0" * 300])
    length = rng.choice([0, 1, 35_000, 2**31, rng.randrange(2**32)]).to_bytes(4, "big")
    padding, number = rng.randrange(256), rng.choice([20, 30, 50, 80, 90, rng.randrange(256)])
    return version + length + bytes([padding, number]) + rng.randbytes(rng.randrange(200))


def test_the_limit_on_open_files_fits_the_limit_on_connections(gateway: GatewayProcess) -> None:
    soft, hard = psutil.Process(gateway.pid).rlimit(psutil.RLIMIT_NOFILE)
    # Each connection has a socket, and one for a stream.
    assert soft == hard or soft >= 2 * CONNECTIONS


def test_another_host_key_is_never_made(
    gateway: GatewayProcess,
) -> None:
    async def host_key() -> bytes:
        found = await asyncssh.get_server_host_key(HOST, gateway.ssh_port, config=None)
        assert found is not None
        return found.export_public_key()

    before = asyncio.run(host_key())
    gateway.stop()
    gateway.start()
    assert asyncio.run(host_key()) == before


def test_a_client_may_not_try_keys_without_end(gateway: GatewayProcess) -> None:
    async def offer(count: int) -> None:
        keys = [asyncssh.generate_private_key("ssh-ed25519") for _ in range(count)]
        async with asyncssh.connect(
            HOST, gateway.ssh_port, username="x", client_keys=keys, known_hosts=None, config=None
        ):
            pass

    with pytest.raises(asyncssh.PermissionDenied):
        asyncio.run(offer(KEYS_OFFERED))
    with pytest.raises(asyncssh.DisconnectError, match="IdentitiesOnly=yes"):
        asyncio.run(offer(KEYS_OFFERED + 1))


@pytest.fixture
def limited(server: ServerProcess, workspace: Workspace, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway with rate limits."""
    environment = server.environment | {"MOORING_RATE_LIMITS": "on"}
    with running_gateway(environment, workspace, tmp_path, HOST) as gateway:
        yield gateway


def test_wrong_keys_are_counted_per_address(limited: GatewayProcess, key: asyncssh.SSHKey) -> None:
    for _ in range(FAILED_ATTEMPTS):
        assert asyncio.run(answers(limited, key, "127.0.0.3"))
    with pytest.raises(asyncssh.DisconnectError, match="too many invalid credentials came from your address"):
        wait_until(lambda: not asyncio.run(answers(limited, key, "127.0.0.3")))
    assert asyncio.run(answers(limited, key, "127.0.0.4"))


def test_sessions_of_a_key_are_limited_per_minute(
    server: ServerProcess, limited: GatewayProcess, key: asyncssh.SSHKey
) -> None:
    with server.client as admin:
        made = admin.post("/v1/api-keys", json={"name": "k", "role": "member"}).json()
    with Client(server.url, key=made["key"]) as member:
        body = {"name": "k", "public_key": key.export_public_key().decode()}
        assert member.post("/v1/ssh-keys", json=body).status_code == 201
        member.create(name="waits")  # there is no node
    limit = REQUESTS[ActionClass.STREAM]
    errors = asyncio.run(refusals(limited, key, "waits", limit + 1))
    assert set(errors[:limit]) == {"mooring: the instance is pending and has no container yet\n"}
    assert f"you have made {limit} requests" in errors[-1]


async def refusals(gateway: GatewayProcess, key: asyncssh.SSHKey, name: str, count: int) -> list[str]:
    """Why sessions in an instance end, one after the other."""
    async with asyncssh.connect(
        HOST, gateway.ssh_port, username=name, client_keys=[key], known_hosts=None, config=None
    ) as connection:
        return [str((await connection.run("true")).stderr) for _ in range(count)]
