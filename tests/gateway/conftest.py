"""A server and a gateway without nodes: logins need none."""

from collections.abc import Iterator

import pytest

from tests.gateway.port_proxy import DOMAIN, Proxy, running_proxy
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


@pytest.fixture(scope="module")
def shared(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A port proxy with a domain, and the instance `box`."""
    with running_proxy(workspace, tmp_path_factory.mktemp("proxy"), DOMAIN) as made:
        made.instance("box")
        yield made


@pytest.fixture
def proxy(shared: Proxy) -> Iterator[Proxy]:
    yield from shared.checked()
