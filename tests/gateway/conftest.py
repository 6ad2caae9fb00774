"""A server and a gateway without nodes: logins need none."""

from collections.abc import Iterator

import pytest

from tests.testbed.workspace import Workspace
from tests.walk.product import GatewayProcess, ServerProcess, running_gateway

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def server(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    port = workspace.take_port()
    made = ServerProcess(tmp_path_factory.mktemp("server"), HOST, port, MOORING_RATE_LIMITS="off")
    made.forked = True
    made.start()
    yield made
    made.stop()
    workspace.give_back_port(port)


@pytest.fixture(scope="module")
def gateway(
    server: ServerProcess, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(server.environment, workspace, folder, HOST) as gateway:
        yield gateway
