"""A service with a simulated node, and a client of it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mooring_client import Mooring
from mooring_client.errors import NotFound
from tests.nodes import SimulatedNode, simulated_node
from tests.service import ADMIN_KEY, Client, RunningService, running, settings_for

IMAGE = "mooring-test/busybox:1"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder: Path = tmp_path_factory.mktemp("client")
    with running(settings_for(f"sqlite:///{folder / 'mooring.db'}", folder / "data")) as service:
        yield service


@pytest.fixture(scope="module")
def node(shared: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    with shared.client as admin, simulated_node(admin, tmp_path_factory.mktemp("node"), "gpu-1") as found:
        yield found


@pytest.fixture
def mooring(shared: RunningService, node: SimulatedNode) -> Iterator[Mooring]:
    """A client of a service with a node; it deletes all instances after the test."""
    with Mooring(shared.url, ADMIN_KEY) as found:
        yield found
        for instance in found.instances.list():
            with suppress(NotFound):
                found.instances.delete(instance.id)
                found.instances.wait(instance.id, "deleted", timeout_s=20)


@pytest.fixture
def admin(shared: RunningService) -> Iterator[Client]:
    with shared.client as client:
        yield client
