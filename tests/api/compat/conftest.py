"""A service for SkyPilot with a simulated node of four H100 GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import simulated_node
from tests.service import Client, RunningService, running, settings_for
from tests.tenancy.facade import PREFIX
from tests.testbed.waiting import wait_until

IMAGE = "registry.example.com/skypilot-ready:1"


@pytest.fixture(scope="module")
def sky_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder: Path = tmp_path_factory.mktemp("sky")
    settings = settings_for(
        f"sqlite:///{folder / 'mooring.db'}", folder / "data",
        skypilot_image=IMAGE, ssh_public_host="gpus.example.com", ssh_port=2222, rate_limits="off",
    )  # fmt: skip
    with (
        running(settings) as service,
        service.client as admin,
        simulated_node(admin, folder / "node", "gpu-1", gpus=4, labels={"region": "berlin"}),
    ):
        wait_until(lambda: admin.items("/v1/gpus") != [])
        yield service


@pytest.fixture
def sky(sky_service: RunningService) -> Iterator[Client]:
    """A client; all pods are deleted after the test."""
    with sky_service.client as client:
        yield client
        for pod in client.get(f"{PREFIX}/pods").json()["data"]:
            client.delete(f"{PREFIX}/pods/{pod['id']}")
        wait_until(lambda: client.get(f"{PREFIX}/pods").json()["data"] == [])
