"""The product on the test bed: one server, agents on as many nodes as a test asks for."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service import Client
from tests.testbed.dockerd import DockerNode
from tests.testbed.workspace import Workspace
from tests.walk.product import AgentProcess, ServerProcess


@pytest.fixture
def server(workspace: Workspace, root_address: str, tmp_path: Path) -> Iterator[ServerProcess]:
    port = workspace.take_port()
    made = ServerProcess(tmp_path / "server", root_address, port)
    made.start()
    yield made
    made.stop()
    workspace.give_back_port(port)


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[Client]:
    with server.client as made:
        yield made


@pytest.fixture
def agents(
    server: ServerProcess, admin: Client, docker_nodes: Callable[[int], list[DockerNode]], tmp_path: Path
) -> Iterator[Callable[[int], list[AgentProcess]]]:
    """The agents of the first `count` nodes, ready."""
    made: list[AgentProcess] = []

    def first(count: int) -> list[AgentProcess]:
        for node in docker_nodes(count)[len(made) :]:
            made.append(AgentProcess(node, server, tmp_path / node.name))
            made[-1].start()
        for agent in made:
            agent.await_ready(admin)
        return made

    yield first
    for agent in made:
        agent.stop()
        agent.node.remove_containers()


@pytest.fixture
def agent(agents: Callable[[int], list[AgentProcess]]) -> AgentProcess:
    return agents(1)[0]
