"""A gateway whose server uses PostgreSQL: notifications pass between them, and PostgreSQL may be away."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from tests.gateway.conftest import HOST
from tests.nodes import simulated_node
from tests.service import Client
from tests.testbed.fixtures import NewPostgresCluster
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import GatewayProcess, ServerProcess, running_gateway


@pytest.fixture
def postgresql(new_postgres_cluster: NewPostgresCluster) -> PostgresCluster:
    return new_postgres_cluster()


@pytest.fixture
def server(postgresql: PostgresCluster, workspace: Workspace, tmp_path: Path) -> Iterator[ServerProcess]:
    port = workspace.take_port()
    url = postgresql.create_database()
    made = ServerProcess(tmp_path / "server", HOST, port, MOORING_DATABASE_URL=url)
    made.forked = True
    made.start()
    yield made
    made.stop()
    workspace.give_back_port(port)


@pytest.fixture
def gateway(server: ServerProcess, workspace: Workspace, tmp_path: Path) -> Iterator[GatewayProcess]:
    with running_gateway(server.environment, workspace, tmp_path, HOST) as gateway:
        yield gateway


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[Client]:
    with server.client as client:
        yield client


class Session:
    """Sessions with a key of the admin's."""

    def __init__(self, gateway: GatewayProcess, admin: Client) -> None:
        self._gateway = gateway
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        body = {"name": "k", "public_key": self._key.export_public_key().decode()}
        assert admin.post("/v1/ssh-keys", json=body).status_code == 201

    def connect(self) -> "asyncssh.misc._ACMWrapper[asyncssh.SSHClientConnection]":
        return asyncssh.connect(
            HOST,
            self._gateway.ssh_port,
            username="box",
            client_keys=[self._key],
            known_hosts=None,
            config=None,
        )

    async def output(self) -> str:
        """The output of a command; empty while PostgreSQL is away."""
        try:
            async with self.connect() as connection:
                return str((await connection.run("echo hello")).stdout)
        except asyncssh.DisconnectError:
            return ""


def test_an_outage_refuses_new_sessions_and_keeps_open_ones(
    postgresql: PostgresCluster, gateway: GatewayProcess, admin: Client, tmp_path: Path
) -> None:
    session = Session(gateway, admin)
    with simulated_node(admin, tmp_path / "node", "sim-1"):
        made = admin.create(name="box", gpus={"count": 1})
        admin.wait(made["id"], "running")
        assert asyncio.run(session.output()) == "hello\n"
        asyncio.run(during_an_outage(session, postgresql))
        wait_until(lambda: asyncio.run(session.output()) == "hello\n", 60)


async def during_an_outage(session: Session, postgresql: PostgresCluster) -> None:
    async with session.connect() as connection, connection.create_process() as shell:
        shell.stdin.write("echo is open\n")
        await shell.stdout.readuntil("is open\n")
        postgresql.kill()
        refused = await connection.run("echo hello")
        assert "the control plane's database does not answer; try again soon" in str(refused.stderr)
        assert refused.exit_status == 255
        shell.stdin.write("echo still open\n")
        await shell.stdout.readuntil("still open\n")
        postgresql.start()
