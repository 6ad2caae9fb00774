"""The product on the test bed: one server, agents on two nodes, shared by the tests of a module.

Each test starts with an idle cluster. Afterwards all processes are restored, the invariants are checked,
the instances are deleted, and no trace of them may remain.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service import ADMIN_KEY, Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.postgres import PostgresCluster
from tests.testbed.waiting import wait_until
from tests.testbed.workspace import Workspace
from tests.walk.checker import Found, Invariants, all_instances, containers_on
from tests.walk.docker_client import DockerClient
from tests.walk.product import AgentProcess, GatewayProcess, ServerProcess, running_gateway
from tests.walk.ssh_client import SshClient
from tests.walk.up import Up

SETTLE_S = 60  # the time within which all operations in progress end


class Cluster:
    """A server, its agents and their nodes."""

    def __init__(self, server: ServerProcess, nodes: list[DockerNode], folder: Path) -> None:
        self.server = server
        self.server.start()
        self.admin: Client = server.client
        self.agents = [AgentProcess(node, server, folder / node.name) for node in nodes]
        self.foreign: set[str] = set()
        for agent in self.agents:
            agent.forked = True
            agent.start()
        self.ready()

    @property
    def nodes(self) -> list[DockerNode]:
        return [agent.node for agent in self.agents]

    def agent_of(self, instance: dict[str, object]) -> AgentProcess:
        return next(agent for agent in self.agents if agent.node.name == instance["node_name"])

    def containers(self) -> list[Found]:
        return [found for node in self.nodes for found in containers_on(node)]

    def container(self, instance: dict[str, object]) -> Found:
        """The one container of an instance."""
        found = [each for each in self.containers() if each.instance == instance["id"]]
        assert len(found) == 1, found
        return found[0]

    def restore(self) -> None:
        """Restart killed processes and thaw frozen ones."""
        for agent in self.agents:
            for daemon in (agent.node.containerd, agent.node.dockerd):
                if daemon.running:
                    daemon.thaw()
            agent.node.reconnect()
            agent.node.start()
        if not self.server.running:
            self.server.start()
        self.server.thaw()
        for agent in self.agents:
            if not agent.running:
                agent.start()
            agent.thaw()

    def ready(self) -> None:
        for agent in self.agents:
            agent.await_ready(self.admin)

    def invariants(self) -> Invariants:
        return Invariants(self.admin, self.nodes, self.server.database_url, self.foreign)

    def check(self, within_s: float = SETTLE_S) -> None:
        """Wait until the invariants hold."""
        invariants = self.invariants()
        try:
            wait_until(lambda: not invariants.check(), within_s, 0.1)
        except AssertionError:
            raise AssertionError("\n".join(invariants.problems or invariants.check())) from None

    def clear(self) -> None:
        """Delete every instance, and check that nothing remains."""
        for instance_id, instance in all_instances(self.admin).items():
            if "stop" in instance["actions"]:
                self.admin.post(f"/v1/instances/{instance_id}/stop", json={"timeout_s": 0})
            answer = self.admin.delete(f"/v1/instances/{instance_id}")
            assert answer.status_code in {202, 404}, answer.text
        wait_until(lambda: not all_instances(self.admin), SETTLE_S, 0.05)
        self.check()
        assert {found.name for found in self.containers()} == self.foreign
        held = [gpu for gpu in self.admin.items("/v1/gpus", limit=200) if gpu["instance_id"]]
        assert not held

    def close(self) -> None:
        self.admin.close()
        for agent in self.agents:
            agent.close()
        self.server.stop()


NewServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def new_server(
    workspace: Workspace, root_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewServer]:
    """Makes servers with settings of their own; the caller starts them."""
    made: list[tuple[ServerProcess, int]] = []

    def new(**settings: str) -> ServerProcess:
        port = workspace.take_port()
        server = ServerProcess(tmp_path_factory.mktemp("server"), root_address, port, **settings)
        server.forked = True
        made.append((server, port))
        return server

    yield new
    for server, port in made:
        server.stop()
        workspace.give_back_port(port)


@pytest.fixture(scope="module")
def shared_cluster(
    request: pytest.FixtureRequest,
    new_server: NewServer,
    docker_nodes: Callable[[int], list[DockerNode]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """On SQLite, unless a module asks for `postgresql` by an indirect parameter."""
    settings = {}
    if getattr(request, "param", "sqlite") == "postgresql":
        cluster: PostgresCluster = request.getfixturevalue("postgres_cluster")
        settings["MOORING_DATABASE_URL"] = cluster.create_database()
    nodes = docker_nodes(2)
    made = Cluster(new_server(**settings), nodes, tmp_path_factory.mktemp("agents"))
    yield made
    made.close()
    for node in nodes:
        node.remove_containers()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    shared_cluster.restore()
    shared_cluster.ready()
    yield shared_cluster
    shared_cluster.restore()
    shared_cluster.ready()
    shared_cluster.check()
    shared_cluster.clear()


@pytest.fixture
def admin(cluster: Cluster) -> Client:
    return cluster.admin


@pytest.fixture
def up(workspace: Workspace, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    made: list[Up] = []
    port = workspace.take_port()

    def new(**environment: str) -> Up:
        made.append(Up(tmp_path, port, **environment))
        made[-1].start()
        return made[-1]

    yield new
    for each in made:
        each.kill()
    workspace.give_back_port(port)


@pytest.fixture(scope="module")
def gateway(
    shared_cluster: Cluster, workspace: Workspace, root_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    environment, folder = shared_cluster.server.environment, tmp_path_factory.mktemp("gateway")
    with running_gateway(
        environment, workspace, folder, root_address, MOORING_GATEWAY_DRAIN_S="0.5"
    ) as gateway:
        yield gateway


@pytest.fixture
def ssh(admin: Client, gateway: GatewayProcess, tmp_path: Path) -> Iterator[SshClient]:
    """A client whose key acts as the admin key."""
    client = SshClient(admin, gateway, tmp_path)
    key_id = client.register()
    yield client
    admin.delete(f"/v1/ssh-keys/{key_id}")


@pytest.fixture(scope="module")
def docker_gateway(
    shared_cluster: Cluster, workspace: Workspace, root_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    environment, folder = shared_cluster.server.environment, tmp_path_factory.mktemp("gateway")
    environment = environment | {"MOORING_GATEWAY_DRAIN_S": "0.5"}
    with running_gateway(environment, workspace, folder, root_address, docker=True) as gateway:
        yield gateway


@pytest.fixture
def docker(admin: Client, docker_gateway: GatewayProcess, tmp_path: Path) -> DockerClient:
    url = f"tcp://{docker_gateway.host}:{docker_gateway.docker_port}"
    return DockerClient(url, ADMIN_KEY, tmp_path / "docker")
