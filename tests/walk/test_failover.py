"""PostgreSQL fails over to a standby (docs/operating.md, "PostgreSQL with a standby")."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.nodes import join_token
from tests.testbed.fixtures import NewPostgresCluster
from tests.testbed.postgres import PASSWORD, ROLE, PostgresCluster, PostgresStandby
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.product import Program, ServerProcess, clean_environment

ACKNOWLEDGED = 20


@pytest.fixture
def primary(new_postgres_cluster: NewPostgresCluster) -> PostgresCluster:
    return new_postgres_cluster(durable=False)


@pytest.fixture
def standby(primary: PostgresCluster, workspace: Workspace) -> Iterator[PostgresStandby]:
    made = PostgresStandby(workspace, primary)
    made.start()
    wait_until(primary.standbys)
    yield made
    made.destroy()


@pytest.fixture
def server(
    primary: PostgresCluster, standby: PostgresStandby, workspace: Workspace, tmp_path: Path
) -> Iterator[ServerProcess]:
    """A server that knows both hosts."""
    database = primary.create_database().rsplit("/", 1)[1]
    hosts = f"{ROLE}:{PASSWORD}@{primary.address},{standby.address}"
    url = f"postgresql://{hosts}/{database}?target_session_attrs=read-write"
    port = workspace.take_port()
    made = ServerProcess(tmp_path / "server", "127.0.0.1", port, MOORING_DATABASE_URL=url)
    made.start()
    yield made
    made.stop()
    workspace.give_back_port(port)


def fail_over(primary: PostgresCluster, standby: PostgresStandby, server: ServerProcess) -> None:
    """Kill the primary and promote the standby. The server ends, and is started again as by systemd."""
    primary.kill()
    standby.promote()
    assert server.wait(30) == 1, server.tail()
    assert "failed over: this server must start again" in server.tail()
    server.start()


def test_a_synchronous_standby_has_every_acknowledged_request(
    primary: PostgresCluster, standby: PostgresStandby, server: ServerProcess
) -> None:
    primary.replicate_synchronously()
    acknowledged: list[str] = []
    stopped = threading.Event()

    def create() -> None:
        number = 0
        with server.client as client, suppress(httpx.TransportError):
            while not stopped.is_set():
                number += 1
                answer = client.post("/v1/instances", json={"image": "a", "name": f"made-{number}"})
                if answer.status_code == 201:
                    acknowledged.append(answer.json()["id"])
                else:
                    assert answer.status_code == 503, answer.text

    thread = threading.Thread(target=create)
    thread.start()
    try:
        wait_until(lambda: len(acknowledged) >= ACKNOWLEDGED)
        fail_over(primary, standby, server)
    finally:
        stopped.set()
        thread.join(30)
    with server.client as client:
        kept = {each["id"] for each in client.items("/v1/instances", limit=200)}
    assert set(acknowledged) <= kept
    assert len(acknowledged) >= ACKNOWLEDGED


def test_nodes_ahead_of_an_asynchronous_standby_change_nothing(
    primary: PostgresCluster, standby: PostgresStandby, server: ServerProcess, tmp_path: Path
) -> None:
    with server.client as admin:
        settings = {
            "MOORING_DATA_DIR": str(tmp_path / "node"),
            "MOORING_SERVER_URL": server.url,
            "MOORING_SIMULATE": "1x8xH100",
            "MOORING_JOIN_TOKEN": join_token(admin),
        }
    agent = Program(["agent"], clean_environment() | settings, tmp_path / "agent.log")
    agent.start()
    try:
        with server.client as admin:
            kept = admin.create(gpus={"count": 1})
            admin.wait(kept["id"], "running")
            standby.detach()
            lost = admin.create(gpus={"count": 1})
            admin.wait(lost["id"], "running")
        fail_over(primary, standby, server)
        with server.client as admin:
            (listed,) = admin.items("/v1/nodes")
            path = f"/v1/nodes/{listed['id']}"
            wait_until(lambda: admin.get(path).json()["state"] == "not_ready", 20)
            wait_until(lambda: admin.get(path).json()["orphans"], 20)
            node = admin.get(path).json()
            assert node["reason"]["code"] == "generation_regressed"
            assert [each["instance_id"] for each in node["orphans"]] == [lost["id"]]
            assert admin.instance(kept["id"])["state"] == "running"
    finally:
        agent.stop()
